// Sets every formula with KaTeX, which lies beside this file.
document.addEventListener("DOMContentLoaded", () => {
  for (const formula of document.querySelectorAll(".tex"))
    katex.render(formula.textContent, formula,
                 {displayMode: formula.tagName == "DIV", throwOnError: false});
});
