// Keeps the page of a run up to date: fetches it again whenever the server says that the run has changed.
"use strict";
const live = document.querySelector("[data-live]");
if (live) {
  const notice = document.querySelector(".notice");
  if (notice) {  // of a button, some seconds ago
    history.replaceState(null, "", location.pathname);
    setTimeout(() => notice.remove(), 15000);
  }
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
  // A browser opens few connections to one server, so a page that nobody sees keeps none; the first event of a new
  // one brings it up to date.
  let source = null;
  const listen = () => {
    source?.close();
    source = document.hidden ? null : new EventSource(live.dataset.live);
    if (source) source.onmessage = update;
  };
  listen();
  document.addEventListener("visibilitychange", listen);
  addEventListener("pagehide", () => source?.close());
  addEventListener("pageshow", (event) => { if (event.persisted) listen(); });
}
