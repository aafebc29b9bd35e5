// Before anything is painted: a theme that was chosen here goes before the system's.
"use strict";
try {
  const theme = localStorage.getItem("atom.theme");
  if (theme === "light" || theme === "dark") document.documentElement.dataset.theme = theme;
} catch {
  // No storage, no choice to remember.
}
