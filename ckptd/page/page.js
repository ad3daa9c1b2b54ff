"use strict";
(() => {
  const live = "live" in document.body.dataset;

  // Copy buttons, and names of jobs to filter by: without a script the page has neither.
  const dress = () => {
    if (navigator.clipboard) for (const one of document.querySelectorAll("button.copy[hidden]")) one.hidden = false;
    const filter = document.getElementById("filter");
    const wanted = filter ? filter.value.toLowerCase() : "";
    for (const job of document.querySelectorAll("details.job")) job.hidden = !job.dataset.name.toLowerCase().includes(wanted);
  };
  document.addEventListener("click", async (event) => {
    const button = event.target.closest("button.copy");
    if (!button) return;
    await navigator.clipboard.writeText(button.parentElement.querySelector("code").textContent);
    button.textContent = "Copied";
    setTimeout(() => { button.textContent = "Copy"; }, 1500);
  });
  document.addEventListener("input", (event) => { if (event.target.id === "filter") dress(); });
  const follow = () => {
    const job = location.hash.length > 1 && document.getElementById(location.hash.slice(1));
    if (job && job.matches("details.job")) { job.open = true; job.scrollIntoView(); }
  };
  addEventListener("hashchange", follow);
  dress();
  if (!live) { follow(); return; }

  // The token came after `#`, which no server and no log sees; it leaves the address bar, and stays in this tab.
  const given = /^#token=([\w-]+)$/.exec(location.hash);
  if (given) {
    sessionStorage.setItem("token", given[1]);
    history.replaceState(null, "", location.pathname);
  }
  const token = sessionStorage.getItem("token") || "";
  // What the server sends is escaped there, and the page's policy lets no other script run.
  const html = window.trustedTypes ? trustedTypes.createPolicy("ckptd", {createHTML: (text) => text}) : {createHTML: (text) => text};
  const offline = document.getElementById("offline");
  const seconds = 2;
  let opened = null, isAsking = false, isWanted = false, timer = 0;

  // Make `to` what `from` is, changing only what differs: a selection, the focus and the scroll position stay.
  const morph = (to, from) => {
    const kept = to.nodeName === "DETAILS" ? ["open", "hidden"] : to.nodeName === "BUTTON" ? ["hidden"] : [];
    for (const {name} of [...to.attributes]) if (!from.hasAttribute(name) && !kept.includes(name)) to.removeAttribute(name);
    for (const {name, value} of from.attributes) if (to.getAttribute(name) !== value && !kept.includes(name)) to.setAttribute(name, value);
    const fresh = [...from.childNodes];
    fresh.forEach((child, place) => {
      let old = to.childNodes[place];
      if (child.id && (!old || old.id !== child.id)) {
        const same = [...to.children].find((one) => one.id === child.id);
        if (same) { to.insertBefore(same, old || null); old = same; }
      }
      if (!old) to.append(child);
      else if (old.nodeType !== child.nodeType || old.nodeName !== child.nodeName || (old.id || "") !== (child.id || "")) old.replaceWith(child);
      else if (child.nodeType !== Node.ELEMENT_NODE) { if (old.data !== child.data) old.data = child.data; }
      else if (!(old.nodeName === "BUTTON" && old.textContent === "Copied")) morph(old, child);
    });
    while (to.childNodes.length > fresh.length) to.lastChild.remove();
  };

  const say = (text) => {
    offline.hidden = !text;
    if (offline.textContent !== text) offline.textContent = text;
    document.body.classList.toggle("stale", Boolean(text));
  };

  const ask = async () => {
    clearTimeout(timer);
    if (isAsking) { isWanted = true; return; }
    isAsking = true;
    try {
      const query = opened ? `?open=${[...opened].join(",")}` : "";
      const answer = await fetch(`jobs${query}`, {headers: {Authorization: `Bearer ${token}`}, cache: "no-store"});
      if (answer.status === 401) { say("This address has no valid token: open the one that `ckptd ui` printed."); return; }
      if (!answer.ok) throw new Error(answer.status);
      const fresh = new DOMParser().parseFromString(html.createHTML(await answer.text()), "text/html").getElementById("page");
      const page = document.getElementById("page");
      document.title = fresh.dataset.title;
      morph(page, fresh);
      dress();
      say("");
      if (!opened) follow();
      if (!opened && !("reading" in page.dataset)) opened = new Set();
      if (opened) for (const one of document.querySelectorAll("details[id]")) one.open ? opened.add(one.id) : opened.delete(one.id);
    } catch {
      say("ckptd ui does not answer: start it again, and open the address that it prints. What is below is old.");
    } finally {
      isAsking = false;
    }
    if (isWanted) { isWanted = false; ask(); } else if (!document.hidden) timer = setTimeout(ask, 1000 * seconds);
  };
  document.addEventListener("toggle", (event) => {
    if (!opened || !event.target.id) return;
    if (event.target.open === opened.has(event.target.id)) return;
    event.target.open ? opened.add(event.target.id) : opened.delete(event.target.id);
    if (event.target.open) ask();
  }, true);
  document.addEventListener("visibilitychange", () => { if (!document.hidden) ask(); });
  ask();
})();
