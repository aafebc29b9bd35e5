// The page's own parsers, run where they run: any text, cut anywhere.

import assert from "node:assert/strict";

export async function checkParsers(page) {
  const events = await page.evaluate(async () => {
    const { EventParser } = await import("/ui/server.js");
    const stream = ': ping\n\ndata: {"a": 1}\r\n\r\nevent: x\ndata:b\ndata: c\nid: 7\n\ndata: d\r\rdata:\n\ndata: é\n\ndata: lost';
    const read = (pieces) => {
      const parser = new EventParser();
      return pieces.flatMap((piece) => parser.push(piece));
    };
    const all = [read([stream]), read([...stream])];
    for (let cut = 0; cut <= stream.length; cut += 1) all.push(read([stream.slice(0, cut), stream.slice(cut)]));
    return all.map((found) => JSON.stringify(found));
  });
  assert.deepEqual([...new Set(events)], [JSON.stringify(['{"a": 1}', "b\nc", "d", "", "é"])]);

  const seen = await page.evaluate(async (seed) => {
    const { render } = await import("/ui/markdown.js");
    const bits = ["`", "``", "```", "\n", "\n\n", "*", "**", "- ", "  - ", "1. ", "10) ", "# ", "> ", "|", "|-|", "---", "~~~",
      "[a](https://b.c)", "[x](", ")", "<b>", "&lt;", "a", "word ", "\t", " ", "é", "\u{1f980}", "_"];
    let state = seed;
    const draw = (n) => {
      state = (Math.imul(state, 1664525) + 1013904223) >>> 0;
      return Math.floor((state / 2 ** 32) * n);
    };
    const tags = new Set();
    const letters = (text) => text.replace(/[^a-zé\u{1f980}]/gu, "");
    for (let round = 0; round < 300; round += 1) {
      const source = Array.from({ length: 1 + draw(40) }, () => bits[draw(bits.length)]).join("");
      // As it streams: the same elements are brought on piece by piece.
      const grown = document.createElement("div");
      for (let end = 0; end <= source.length; end += 1 + draw(5)) render(grown, source.slice(0, end));
      render(grown, source);
      const whole = document.createElement("div");
      render(whole, source);
      if (grown.innerHTML !== whole.innerHTML) return { wrong: source, why: "grown and whole differ" };
      // A fence's language and a link's address are not shown as text; all else is.
      const shown = letters(whole.textContent);
      const wanted = letters(source.replaceAll("https://b.c", ""));
      if (!source.includes("```") && !source.includes("~~~") && shown.length < wanted.length) {
        return { wrong: source, why: `${shown} of ${wanted}` };
      }
      for (const node of whole.querySelectorAll("*")) tags.add(node.tagName);
    }
    // Long ones must not take the square of their length.
    const long = document.createElement("div");
    render(long, "*a ".repeat(40000));
    render(long, "- ".repeat(3000));
    render(long, "> ".repeat(500) + "x");
    return { tags: [...tags] };
  }, 7);
  assert.equal(seen.wrong, undefined, `${seen.why}: ${JSON.stringify(seen.wrong)}`);
  const known = new Set("A P CODE PRE FIGURE FIGCAPTION SPAN BUTTON STRONG EM UL OL LI HR BLOCKQUOTE DIV TABLE TBODY TR TD TH H3 H4 H5 H6".split(" "));
  assert.deepEqual(seen.tags.filter((tag) => !known.has(tag)), []);
  assert.ok(seen.tags.length > 12, `${seen.tags}: the texts that were drawn are too plain`);
}
