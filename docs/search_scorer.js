// The search of the site: pages of questions and errors first, in the words of those who ask, and pages that list names or figures last.
var Scorer = {
  objNameMatch: 11,
  objPartialMatch: 6,
  objPrio: { 0: 15, 1: 5, 2: -5 },
  objPrioDefault: 0,
  title: 15,
  partialTitle: 7,
  term: 5,
  partialTerm: 2,
  score: ([page, , , , score, , kind]) => {
    if (kind === SearchResultKind.title) return 3 * score; // a heading with the words leads to its place in the page
    if (kind !== SearchResultKind.text) return score;
    if (/^(questions|errors)$/.test(page)) return score + 1;
    return /^(api(\/.*)?|architecture|json|options|report)$/.test(page) ? score - 20 : score;
  },
};
