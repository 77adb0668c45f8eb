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

const WORD = /[\p{L}\p{N}_]+/gu;
const EXCERPT = 240; // characters

// The place in a text from which most of the stems follow soon, each as a whole word, or else as the beginning of one.
const placeOf = (text, stems) => {
  const stemmer = new Stemmer();
  const words = [...text.matchAll(WORD)].map((found) => ({ at: found.index, lower: found[0].toLowerCase() }));
  const metBy = (isOf) =>
    words.flatMap(({ at, lower }) => [...stems].filter((stem) => isOf(lower, stem)).map((stem) => ({ at, stem })));
  const whole = metBy((word, stem) => stemmer.stemWord(word) === stem);
  const met = whole.length ? whole : metBy((word, stem) => word.startsWith(stem));
  const together = met.map(({ at }) => {
    const near = met.filter((other) => other.at >= at && other.at < at + EXCERPT / 2);
    return new Set(near.map(({ stem }) => stem)).size;
  });
  return met.length ? met[together.indexOf(Math.max(...together))].at : 0;
};

// Sphinx looks for the letters of a stem, which it finds in other words ("hang" in "change"), or nowhere ("memori").
const excerptFrom = Search.makeSearchSummary;
Search.makeSearchSummary = (page, stems, anchor) => {
  const text = Search.htmlToText(page, anchor);
  const place = placeOf(text, stems);
  return excerptFrom(page, [text.slice(place, place + EXCERPT)], anchor);
};

// The index leads to parts of pages, and Sphinx names the pages alone. A part that is found twice is shown once.
const searched = Search._performSearch;
Search._performSearch = (...query) => {
  const { alltitles, docnames } = Search._index;
  const parts = new Map();
  for (const [title, places] of Object.entries(alltitles))
    for (const [page, id] of places) parts.set(`${docnames[page]}#${id}`, title);
  const shown = new Set();
  const results = searched(...query).reverse(); // the best first
  return results
    .map(([page, title, anchor, ...more]) => {
      const part = parts.get(page + anchor);
      return [page, part && more[3] === SearchResultKind.index ? `${title} > ${part}` : title, anchor, ...more];
    })
    .filter(([page, , anchor]) => {
      const isNew = !shown.has(page + anchor);
      shown.add(page + anchor);
      return isNew;
    })
    .reverse();
};
