// Before the first paint: the theme that was chosen in this browser, if any.
(() => {
  const chosen = localStorage.getItem("paceline-theme");
  if (chosen === "light" || chosen === "dark") document.documentElement.dataset.theme = chosen;
})();
