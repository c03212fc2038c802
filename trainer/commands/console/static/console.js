// Keeps the page of a run up to date: fetches it again whenever the server says that the run has changed.
"use strict";
const live = document.querySelector("[data-live]");
if (live) {
  let isFetching = false, isStale = false;
  const update = async () => {
    isStale = true;
    if (isFetching || document.hidden) return;
    isFetching = true;
    isStale = false;
    try {
      const answer = await fetch(location.href, { credentials: "same-origin" });
      if (!answer.ok) return;
      const fresh = new DOMParser().parseFromString(await answer.text(), "text/html");
      const old = document.querySelector("main"), main = fresh.querySelector("main");
      for (const box of old.querySelectorAll("input[type=checkbox]")) {
        const same = main.querySelector("#" + box.id);
        if (same) same.checked = box.checked;
      }
      const open = [...old.querySelectorAll("details")].map((one) => one.open);
      main.querySelectorAll("details").forEach((one, i) => { one.open = open[i] || false; });
      old.replaceWith(main);
      document.title = fresh.title;
    } finally {
      isFetching = false;
      if (isStale) setTimeout(update, 1000);
    }
  };
  const source = new EventSource(live.dataset.live);
  source.onmessage = update;
  document.addEventListener("visibilitychange", update);
  addEventListener("beforeunload", () => source.close());
}
