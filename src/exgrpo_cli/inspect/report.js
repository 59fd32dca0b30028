// Hides the groups that do not hold every word of the search field.
const field = document.getElementById("find");
const groups = [...document.querySelectorAll(".group")];
const words = groups.map((group) => group.textContent.toLowerCase());
field?.addEventListener("input", () => {
  const wanted = field.value.toLowerCase().split(/\s+/).filter(Boolean);
  let shown = 0;
  groups.forEach((group, i) => {
    group.hidden = !wanted.every((word) => words[i].includes(word));
    shown += !group.hidden;
  });
  document.getElementById("found").textContent = `${shown} of ${groups.length} groups`;
});
