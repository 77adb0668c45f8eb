// Answers searches as the site does, by its own scripts and index: FOLDER. The searches come as JSON on the standard
// input; a list of [page, heading, anchor, excerpt] is printed for each, the best first.
const fs = require("fs");
const vm = require("vm");

const folder = process.argv[2];
// in the order of its page of searches
const scripts = ["documentation_options.js", "doctools.js", "searchtools.js", "language_data.js"];
const page = {
  addEventListener: () => {},
  readyState: "loading",
  getElementById: () => null,
  createElement: () => ({ classList: { add: () => {} } }),
};
const names = vm.createContext({ document: page, SPHINX_HIGHLIGHT_ENABLED: false });
names.window = names;
const run = (name) => vm.runInContext(fs.readFileSync(`${folder}/${name}`, "utf-8"), names, { filename: name });
for (const name of scripts) run(`_static/${name}`);
run("searchindex.js");

// node has no parser of HTML: a part of a page goes from its anchor to the end of its section, or of the article
names.textOf = (html, anchor) => {
  const begin = html.indexOf(anchor ? `id="${anchor.slice(1)}"` : '<article class="bd-article"');
  const end = html.indexOf(anchor ? "</section>" : "</article>", begin);
  const part = html.slice(html.indexOf(">", begin) + 1, end);
  return part.replace(/<script.*?<\/script>|<a class="headerlink".*?<\/a>|<[^>]+>/gs, "");
};
names.read = (file) => fs.readFileSync(`${folder}/${file}`, "utf-8");
const search = vm.runInContext(
  `Search.htmlToText = textOf;
  (words) => {
    const query = Search._parseQuery(words);
    return Search._performSearch(...query).reverse().map(([page, title, anchor]) =>
      [page, title, anchor, Search.makeSearchSummary(read(page + ".html"), query[1], anchor).textContent]);
  }`,
  names,
);
console.log(JSON.stringify(JSON.parse(fs.readFileSync(0, "utf-8")).map(search)));
