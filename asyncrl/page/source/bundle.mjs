// Bundles the page into one file: `node bundle.mjs OUTPUT`, in a folder with these sources and their node_modules.

import { createHash } from "node:crypto";
import { readFileSync, writeFileSync } from "node:fs";
import { build } from "esbuild";

const LIBRARIES = ["@nats-io/nats-core", "@nats-io/jetstream", "@nats-io/nkeys", "@nats-io/nuid", "tweetnacl", "@msgpack/msgpack", "uplot"];
const read = (name) => readFileSync(name, "utf8");

const bundled = await build({
  entryPoints: ["main.js"],
  bundle: true,
  minify: true,
  write: false,
  format: "iife",
  target: "es2022",
  legalComments: "none", // the licences are in the page as a whole
  charset: "ascii",
});
const style = await build({
  stdin: { contents: `${read("node_modules/uplot/dist/uPlot.min.css")}\n${read("style.css")}`, loader: "css" },
  minify: true,
  write: false,
});
// A script ends at the first closing tag, also within a text of it.
const script = bundled.outputFiles[0].text.trim().replaceAll("</script", "<\\/script");
const css = style.outputFiles[0].text.trim();

const byText = new Map(); // libraries that share a licence text, by the text
for (const name of LIBRARIES) {
  const { version } = JSON.parse(read(`node_modules/${name}/package.json`));
  const text = read(`node_modules/${name}/LICENSE`).trim();
  byText.set(text, [...(byText.get(text) ?? []), `${name} ${version}`]);
}
const licences = [...byText].map(([text, names]) => `${names.join(", ")}\n\n${text}`).join("\n\n--------\n\n");

const hash = (text) => `sha256-${createHash("sha256").update(text).digest("base64")}`;
const page = read("index.html")
  .replace("'SCRIPT'", () => `'${hash(script)}'`)
  .replace("'STYLE'", () => `'${hash(css)}'`)
  .replace("/*STYLE*/", () => css)
  .replace("/*LICENCES*/", () => licences)
  .replace("/*SCRIPT*/", () => script);
writeFileSync(process.argv[2], page);
