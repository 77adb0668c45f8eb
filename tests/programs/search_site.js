// Answers searches as the site does, by its own scripts and index: FOLDER. The searches come as JSON on the standard
// input; a list of [page, heading, anchor] is printed for each, the best first.
const fs = require("fs");
const vm = require("vm");

const folder = process.argv[2];
// in the order of its page of searches
const scripts = ["documentation_options.js", "doctools.js", "searchtools.js", "language_data.js"];
const page = { addEventListener: () => {}, readyState: "loading", getElementById: () => null };
const names = vm.createContext({ document: page, SPHINX_HIGHLIGHT_ENABLED: false });
names.window = names;
const run = (name) => vm.runInContext(fs.readFileSync(`${folder}/${name}`, "utf-8"), names, { filename: name });
for (const name of scripts) run(`_static/${name}`);
run("searchindex.js");
const search = vm.runInContext("(words) => Search._performSearch(...Search._parseQuery(words)).reverse()", names);
const found = JSON.parse(fs.readFileSync(0, "utf-8")).map(search);
console.log(JSON.stringify(found.map((results) => results.map((result) => result.slice(0, 3)))));
