// What the theme leaves out for readers without a mouse: the search has a name, and wide tables scroll by keys.
document$.subscribe(() => {
  document.querySelector(".md-search").setAttribute("aria-label", "Search");
  for (const wrap of document.querySelectorAll(".md-typeset__scrollwrap")) wrap.tabIndex = 0;
});
