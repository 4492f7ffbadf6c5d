// What only the browser can do: change the link, keys. Everything that is shown follows from the link.
(() => {
  "use strict";

  // Change parts of the link; null or "" removes one. Nothing happens where nothing changes.
  function go(changes) {
    const query = new URLSearchParams(location.search);
    for (const [key, value] of Object.entries(changes)) {
      if (value === null || value === undefined || value === "") query.delete(key);
      else query.set(key, value);
    }
    query.sort();
    const now = new URLSearchParams(location.search);
    now.sort();
    if (query.toString() !== now.toString()) {
      dash_clientside.set_props("url", { search: "?" + query });
    }
  }

  function themed() {
    const dark = new URLSearchParams(location.search).get("theme") === "dark";
    document.documentElement.dataset.theme = dark ? "dark" : "light";
  }

  function toggleTheme() {
    const dark = document.documentElement.dataset.theme === "dark";
    document.documentElement.dataset.theme = dark ? "light" : "dark";
    go({ theme: dark ? "light" : "dark" });
  }

  function toggleHelp() {
    const keys = document.getElementById("keys");
    if (keys.open) keys.close();
    else keys.showModal();
  }

  const clear = () => go({ steps: null, ranks: null, time: null, node: null });

  const nothing = () => dash_clientside.no_update;
  window.dash_clientside = Object.assign({}, window.dash_clientside, {
    dpro: {
      steps: (value) => { go({ steps: (value || "").trim() }); return nothing(); },
      ranks: (value) => { go({ ranks: (value || "").trim() }); return nothing(); },
      clear: () => { clear(); return nothing(); },
      theme: () => { toggleTheme(); return nothing(); },
      help: () => { toggleHelp(); return nothing(); },
    },
  });

  const keys = {
    t: toggleTheme,
    x: clear,
    "?": toggleHelp,
    "/": () => (document.getElementById("filter") || document.getElementById("steps")).focus(),
  };

  document.addEventListener("keydown", (event) => {
    const typing = event.target.closest("input, textarea, select");
    if (event.key === "Escape" && typing) event.target.blur();
    if (typing || event.ctrlKey || event.metaKey || event.altKey) return;
    if (/^[1-9]$/.test(event.key)) {
      const link = document.querySelectorAll("nav a")[Number(event.key) - 1];
      if (link) link.click();
      return;
    }
    const act = keys[event.key];
    if (act) {
      event.preventDefault();
      act();
    }
  });

  window.addEventListener("popstate", themed);
  window.dpro = { go, keys };
})();
