"""What a JobSet may have (jobset.x-k8s.io/v1alpha2, v0.13): names, types and choices of its definition.

Source: config/components/crd/bases/jobset.x-k8s.io_jobsets.yaml of kubernetes-sigs/jobset (Apache 2.0). Templates of
jobs are left out, because those of Kubernetes itself hold for them.
"""

from __future__ import annotations

from typing import Any

TEXT, NUMBER, BOOLEAN = {"type": "string"}, {"type": "integer"}, {"type": "boolean"}
TEXTS = {"type": "array", "items": TEXT}
TEXT_BY_NAME = {"type": "object", "additionalProperties": TEXT}


def choice(*values: str) -> dict[str, Any]:
    return {"enum": list(values)}


def record(required: str = "", **properties: Any) -> dict[str, Any]:
    """An object with these properties and no others."""
    return {"type": "object", "properties": properties, "required": required.split(), "additionalProperties": False}


def many(item: dict[str, Any]) -> dict[str, Any]:
    return {"type": "array", "items": item}


METADATA = record(annotations=TEXT_BY_NAME, finalizers=TEXTS, labels=TEXT_BY_NAME, name=TEXT, namespace=TEXT)
FAILURE_ACTIONS = choice("FailJobSet", "RestartJobSet", "RestartJobSetAndIgnoreMaxRestarts", "RestartJob")
SCHEMA = record(
    "apiVersion kind metadata spec",
    apiVersion=choice("jobset.x-k8s.io/v1alpha2"),
    kind=choice("JobSet"),
    metadata=METADATA,
    spec=record(
        coordinator=record("replicatedJob", jobIndex=NUMBER, podIndex=NUMBER, replicatedJob=TEXT),
        failurePolicy=record(
            maxRestarts=NUMBER,
            restartStrategy=choice("Recreate", "BlockingRecreate"),
            rules=many(
                record(
                    "action name",
                    action=FAILURE_ACTIONS,
                    name={"type": "string", "pattern": "^[A-Za-z]([A-Za-z0-9_,:]*[A-Za-z0-9_])?$"},
                    onJobFailureReasons=TEXTS,
                    targetReplicatedJobs=TEXTS,
                )
            ),
        ),
        managedBy=TEXT,
        network=record(enableDNSHostnames=BOOLEAN, publishNotReadyAddresses=BOOLEAN, subdomain=TEXT),
        replicatedJobs=many(
            record(
                "name template",
                dependsOn=many(record("name status", name=TEXT, status=choice("Ready", "Complete"))),
                groupName=TEXT,
                name=TEXT,
                replicas=NUMBER,
                template=record(metadata=METADATA, spec={"type": "object"}),
            )
        ),
        startupPolicy=record("startupPolicyOrder", startupPolicyOrder=choice("AnyOrder", "InOrder")),
        successPolicy=record("operator", operator=choice("All", "Any"), targetReplicatedJobs=TEXTS),
        suspend=BOOLEAN,
        ttlSecondsAfterFinished=NUMBER,
    ),
)
