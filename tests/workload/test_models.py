"""The built-in models: shapes, names, sizes."""

from __future__ import annotations

import inspect
import subprocess
import sys

import pytest

from trainer.workload.data.examples import ArraySpec, Spec
from trainer.workload.models import MODELS, cnn, ctr, mlp, resnet20

OF_SHAPES = [name for name in MODELS if name != "ctr"]  # which takes features by name
OF_IMAGES = [name for name in OF_SHAPES if name != "oracle"]  # which takes numbers only, in test_oracle.py


def paths(model):
    return [variable.path for variable in model.trainable_variables]


def test_importing_the_models_does_not_import_tensorflow():
    code = "import sys, trainer.workload.models; assert not {'tensorflow', 'keras'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize("name", OF_SHAPES)
def test_every_model_takes_shape_and_classes_and_has_keyword_options_with_defaults(name):
    first, second, *options = inspect.signature(MODELS[name]).parameters.values()
    assert (first.name, second.name) == ("input_shape", "classes")
    assert all(option.kind is option.KEYWORD_ONLY and option.default is not option.empty for option in options)


@pytest.mark.parametrize("name", OF_IMAGES)
def test_every_model_gives_one_logit_a_class(name):
    model = MODELS[name]((32, 32, 3), 7)
    assert model.output_shape == (None, 7)
    assert model.layers[-1].activation.__name__ == "linear"


def test_the_cnn_has_six_parameters_named_by_layer():
    model = cnn((28, 28, 1), 10)
    assert paths(model) == ["conv/kernel", "conv/bias", "dense/kernel", "dense/bias", "logits/kernel", "logits/bias"]
    assert model.count_params() == 2_770_634


def test_the_mlp_numbers_its_layers():
    model = mlp((4, 4), 3, depth=2, width=8)
    assert paths(model) == [
        "dense0/kernel",
        "dense0/bias",
        "dense1/kernel",
        "dense1/bias",
        "logits/kernel",
        "logits/bias",
    ]


def test_an_mlp_of_no_depth_is_linear():
    assert mlp((4, 4), 3, depth=0).count_params() == 4 * 4 * 3 + 3


def test_resnet20_has_the_size_of_the_paper():
    model = resnet20((32, 32, 3), 10)
    trainable = sum(variable.value.shape.num_elements() for variable in model.trainable_variables)
    assert trainable == 269_722  # 0.27 M in table 6
    assert sum(path.endswith(("_conv1/kernel", "_conv2/kernel")) for path in paths(model)) == 18


def test_more_blocks_make_resnet20_deeper():
    convolutions = [layer for layer in resnet20((32, 32, 3), 10, blocks=5).layers if "_conv" in layer.name]
    assert len(convolutions) + 1 == 32  # and the dense layer: ResNet-32


def test_parameter_names_of_resnet20_have_stage_block_and_layer():
    names = paths(resnet20((32, 32, 3), 10))
    assert names[:4] == ["stem_conv/kernel", "stem_norm/gamma", "stem_norm/beta", "stage1_block0_conv1/kernel"]
    assert "stage3_block2_norm2/beta" in names


@pytest.mark.parametrize("name", OF_IMAGES)
def test_names_do_not_depend_on_the_models_built_before(name):
    first, second = (MODELS[name]((32, 32, 3), 10) for _ in range(2))
    assert [v.path for v in first.variables] == [v.path for v in second.variables]


@pytest.mark.parametrize("build", [cnn, mlp])
def test_dropout_is_in_the_model_only_on_request(build):
    def dropouts(model):
        return [layer.name for layer in model.layers if layer.name.startswith("dropout")]

    assert not dropouts(build((8, 8, 1), 2))
    assert dropouts(build((8, 8, 1), 2, dropout=0.5))


@pytest.mark.parametrize("build", [cnn, resnet20])
def test_a_model_of_images_refuses_other_shapes(build, raises):
    with raises(ValueError):
        build((784,), 10)


def test_resnet20_refuses_to_have_no_blocks(raises):
    with raises(ValueError):
        resnet20((32, 32, 3), 10, blocks=0)


def test_the_penalty_of_the_cnn_is_on_its_kernels_alone():
    model = cnn((8, 8, 1), 2, l2=0.5)
    kernels = [variable.numpy() for variable in model.trainable_variables if variable.path.endswith("kernel")]
    assert len(model.losses) == len(kernels) == 3
    assert sum(map(float, model.losses)) == pytest.approx(0.5 * sum((kernel**2).sum() for kernel in kernels), rel=1e-5)
    assert cnn((8, 8, 1), 2).losses == []


def spec_of(**features: ArraySpec) -> Spec:
    return Spec(features, ArraySpec((1,), "float32"), None, 1)


def test_ctr_has_an_embedding_for_each_field_of_ids():
    numbers, ids = ArraySpec((13,), "float32"), ArraySpec((2,), "int64", ids=50)
    model = ctr(spec_of(numbers=numbers, ids=ids), width=3, hidden=[5])
    shapes = {variable.path: tuple(variable.shape) for variable in model.trainable_variables}
    assert shapes["field0/embeddings"] == shapes["field1/embeddings"] == (50, 3)
    assert shapes["dense0/kernel"] == (13 + 2 * 3, 5)
    assert model.output_shape == (None, 1)


def test_ctr_takes_columns_and_may_normalize_the_numbers():
    columns = {"age": ArraySpec((1,), "int64"), "height": ArraySpec((1,), "float32")}
    model = ctr(spec_of(**columns, town=ArraySpec((1,), "int64", ids=9)), width=3, hidden=[], normalize=True)
    assert paths(model) == ["normalize/gamma", "normalize/beta", "field-town/embeddings", "logit/kernel", "logit/bias"]
    assert model.get_layer("normalize").gamma.shape == (2,)


@pytest.mark.parametrize(
    "features",
    [
        {"numbers": ArraySpec((13,), "float32")},
        {"id": ArraySpec((1,), "int64", ids=9), "town": ArraySpec((1,), "string")},
    ],
)
def test_ctr_refuses_features_that_it_cannot_take(features, raises):
    with raises(ValueError):
        ctr(spec_of(**features))
