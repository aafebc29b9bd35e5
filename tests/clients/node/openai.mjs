// What OpenAI's official Node client must get from a server of SmolLM2-135M-Instruct whose template shows tools: run by
// scripts/clients. Every wait is for an answer of the server.
// node openai.mjs URL MODULES

import assert from "node:assert/strict";
import { readFileSync } from "node:fs";
import { createRequire } from "node:module";
import { pathToFileURL } from "node:url";

const [url, modules] = process.argv.slice(2);
const load = createRequire(pathToFileURL(`${modules}/`));
const { default: OpenAI, BadRequestError, NotFoundError, APIUserAbortError } = load("openai");
const { zodFunction, zodResponseFormat, zodTextFormat } = load("openai/helpers/zod");
const { z } = load("zod");
const version = (name) => JSON.parse(readFileSync(`${modules}/node_modules/${name}/package.json`)).version;

const client = new OpenAI({ baseURL: `${url}/v1`, apiKey: "none", maxRetries: 0 });
const [{ id: model }] = (await client.models.list()).data;
const FRANCE = "What is the capital of France? Answer with one word.";
const ask = { model, messages: [{ role: "user", content: FRANCE }], temperature: 0, max_tokens: 24 };
const respond = { model, input: FRANCE, temperature: 0, max_output_tokens: 24 };
const parameters = { type: "object", properties: { city: { enum: ["Paris", "Ulm"] } }, required: ["city"], additionalProperties: false };
const weather = { type: "function", function: { name: "weather", description: "Tells the weather of a city.", parameters } };
const Place = z.object({ country: z.enum(["France", "Spain"]), rivers: z.array(z.enum(["Seine", "Ebro"])).max(2) });

/** The chunks of a chat put together: what the whole answer must say too. */
async function joined(stream) {
  const joined = { text: "", calls: [], logprobs: [], finish: null, usage: null };
  for await (const chunk of stream) {
    joined.usage = chunk.usage ?? joined.usage;
    for (const { delta, finish_reason, logprobs } of chunk.choices) {
      joined.text += delta.content ?? "";
      joined.finish = finish_reason ?? joined.finish;
      joined.logprobs.push(...(logprobs?.content ?? []));
      for (const { index, function: call } of delta.tool_calls ?? []) {
        joined.calls[index] ??= { name: "", arguments: "" };
        joined.calls[index].name += call.name ?? "";
        joined.calls[index].arguments += call.arguments ?? "";
      }
    }
  }
  return joined;
}

const refuses = (call, kind, param) =>
  assert.rejects(call, (error) => {
    assert(error instanceof kind, `${error}`);
    assert(error.requestID, "an error has the id of its request");
    if (param) assert.equal(error.param, param);
    return true;
  });

const tests = {
  async "chat: chunks say what the whole says, tokens, log-probabilities and usage included"() {
    const whole = await client.chat.completions.create({ ...ask, logprobs: true, top_logprobs: 2 });
    const [choice] = whole.choices;
    const asked = { ...ask, logprobs: true, top_logprobs: 2, stream: true, stream_options: { include_usage: true } };
    const parts = await joined(await client.chat.completions.create(asked));
    assert.match(choice.message.content, /Paris/);
    assert(whole._request_id);
    assert.equal(parts.text, choice.message.content);
    assert.equal(parts.finish, choice.finish_reason);
    assert.deepEqual(parts.logprobs, choice.logprobs.content);
    assert.equal(parts.logprobs.length, whole.usage.completion_tokens);
    const counts = ({ prompt_tokens, completion_tokens, total_tokens }) => [prompt_tokens, completion_tokens, total_tokens];
    assert.deepEqual(counts(parts.usage), counts(whole.usage));
    for (const { logprob, top_logprobs } of choice.logprobs.content) assert.equal(logprob, top_logprobs[0].logprob);
  },

  async "chat: the client's own stream puts an answer together"() {
    const whole = await client.chat.completions.create(ask);
    const stream = client.chat.completions.stream(ask);
    let text = "";
    stream.on("content", (delta) => (text += delta));
    const final = await stream.finalChatCompletion();
    assert.deepEqual([text, final.choices[0].finish_reason], [whole.choices[0].message.content, whole.choices[0].finish_reason]);
    assert.equal(final.choices[0].message.content, text);
  },

  async "chat: choices of one seed are the same, streamed or not, and differ among each other"() {
    const asked = { ...ask, temperature: 1.2, seed: 5, n: 3 };
    const whole = await client.chat.completions.create(asked);
    const texts = whole.choices.map((choice) => choice.message.content);
    const parts = ["", "", ""];
    for await (const chunk of await client.chat.completions.create({ ...asked, stream: true }))
      for (const { index, delta } of chunk.choices) parts[index] += delta.content ?? "";
    assert.deepEqual(parts, texts);
    assert(new Set(texts).size > 1, `${texts}`);
  },

  async "chat: a type of zod is what comes back, streamed or not"() {
    const asked = { ...ask, max_tokens: 200, response_format: zodResponseFormat(Place, "place") };
    const { parsed } = (await client.chat.completions.parse(asked)).choices[0].message;
    assert.deepEqual(Place.parse(parsed), parsed);
    const final = await client.chat.completions.stream(asked).finalChatCompletion();
    assert.deepEqual(final.choices[0].message.parsed, parsed);
  },

  async "chat: a call that is required has arguments of its schema, and a stream has the same"() {
    const asked = { ...ask, max_tokens: 200, tools: [weather], tool_choice: "required", parallel_tool_calls: false };
    const [whole] = (await client.chat.completions.create(asked)).choices;
    const calls = whole.message.tool_calls.map(({ function: { name, arguments: text } }) => ({ name, arguments: text }));
    assert.deepEqual(calls.map((call) => call.name), ["weather"]);
    assert(["Paris", "Ulm"].includes(JSON.parse(calls[0].arguments).city), calls[0].arguments);
    assert.equal(whole.finish_reason, "tool_calls");
    const parts = await joined(await client.chat.completions.create({ ...asked, stream: true }));
    assert.deepEqual([parts.calls, parts.finish, parts.text], [calls, "tool_calls", whole.message.content ?? ""]);
  },

  async "chat: the client's loop runs a function and goes on from what it said"() {
    const Weather = z.object({ city: z.enum(["Paris", "Ulm"]) });
    const seen = [];
    const tool = zodFunction({ name: "weather", parameters: Weather, function: ({ city }) => (seen.push(city), "Rain, 12 degrees.") });
    // A named choice ends the loop after its call.
    const choice = { type: "function", function: { name: "weather" } };
    const asked = { ...ask, max_tokens: 200, tools: [tool], tool_choice: choice, parallel_tool_calls: false };
    const loop = client.chat.completions.runTools(asked);
    await loop.done();
    assert(seen.length === 1 && ["Paris", "Ulm"].includes(seen[0]), `${seen}`);
    const streamed = client.chat.completions.runTools({ ...asked, stream: true });
    await streamed.done();
    assert.deepEqual(seen, [seen[0], seen[0]]);
    const messages = loop.messages.map(({ parsed, ...message }) => message);
    assert.deepEqual(messages.map((message) => message.role), ["user", "assistant", "tool"]);
    const next = await client.chat.completions.create({ ...ask, messages, tools: [weather] });
    assert(next.choices[0].message.content || next.choices[0].message.tool_calls.length, "an answer to what the function said");
  },

  async "completions: texts, chunks, tokens and the scores of a prompt"() {
    const asked = { model, prompt: "The capital of France is", max_tokens: 8, temperature: 0, logprobs: 1 };
    const [whole] = (await client.completions.create(asked)).choices;
    assert.match(whole.text, /^ Paris/);
    let text = "";
    const scores = [];
    for await (const chunk of await client.completions.create({ ...asked, stream: true }))
      for (const choice of chunk.choices) {
        text += choice.text;
        scores.push(...(choice.logprobs?.token_logprobs ?? []));
      }
    assert.deepEqual([text, scores], [whole.text, whole.logprobs.token_logprobs]);
    const ids = [504, 3575, 282, 4649, 314];
    assert.equal((await client.completions.create({ ...asked, prompt: ids })).choices[0].text, whole.text);
    const scored = { ...asked, prompt: `${asked.prompt}${whole.text}`, echo: true, max_tokens: 0 };
    const [echoed] = (await client.completions.create(scored)).choices;
    assert.equal(echoed.text, scored.prompt);
    // A token is scored the same as when it was chosen.
    assert.deepEqual(echoed.logprobs.token_logprobs.slice(ids.length), whole.logprobs.token_logprobs);
  },

  async "responses: events add up to the response"() {
    const whole = await client.responses.create(respond);
    assert.match(whole.output_text, /Paris/);
    let text = "";
    const kinds = [];
    for await (const event of await client.responses.create({ ...respond, stream: true })) {
      assert.equal(event.sequence_number, kinds.length);
      kinds.push(event.type);
      if (event.type === "response.output_text.delta") text += event.delta;
    }
    assert.equal(text, whole.output_text);
    assert.equal(kinds[0], "response.created");
    assert.equal(kinds.at(-1), `response.${whole.status}`);
    const final = await client.responses.stream(respond).finalResponse();
    assert.equal(final.output_text, text);
    const talk = [{ role: "user", content: FRANCE }, ...whole.output, { role: "user", content: "And of Italy?" }];
    assert((await client.responses.create({ ...respond, input: talk })).output_text);
  },

  async "responses: a type of zod and a call hold, streamed or not"() {
    const typed = { ...respond, max_output_tokens: 200, text: { format: zodTextFormat(Place, "place") } };
    const parsed = (await client.responses.parse(typed)).output_parsed;
    assert.deepEqual(Place.parse(parsed), parsed);
    assert.deepEqual((await client.responses.stream(typed).finalResponse()).output_parsed, parsed);
    const tool = { type: "function", name: "weather", description: "Tells the weather.", parameters, strict: true };
    const asked = { ...respond, max_output_tokens: 200, tools: [tool], tool_choice: "required", parallel_tool_calls: false };
    const whole = await client.responses.create(asked);
    const [call] = whole.output.filter((item) => item.type === "function_call");
    assert(["Paris", "Ulm"].includes(JSON.parse(call.arguments).city), call.arguments);
    let text = "";
    for await (const event of await client.responses.create({ ...asked, stream: true }))
      if (event.type === "response.function_call_arguments.delta") text += event.delta;
    assert.equal(text, call.arguments);
    const output = { type: "function_call_output", call_id: call.call_id, output: "Rain, 12 degrees." };
    const input = [{ role: "user", content: FRANCE }, ...whole.output, output];
    assert((await client.responses.create({ ...asked, tool_choice: "auto", input })).output.length);
  },

  async "errors are the client's own, with the field and the id of the request"() {
    await refuses(() => client.chat.completions.create({ ...ask, temperature: 3 }), BadRequestError, "temperature");
    await refuses(() => client.chat.completions.create({ ...ask, messages: [] }), BadRequestError, "messages");
    await refuses(() => client.responses.create({ ...respond, store: true }), BadRequestError, "store");
    await refuses(() => client.completions.create({ model, prompt: "a", suffix: "b" }), BadRequestError, "suffix");
    await refuses(() => client.chat.completions.create({ ...ask, model: "other" }), NotFoundError, "model");
    await refuses(() => client.models.retrieve("other"), NotFoundError, "model");
  },

  async "a stream that is given up harms nobody"() {
    const stream = await client.chat.completions.create({ ...ask, max_tokens: 800, stream: true });
    for await (const chunk of stream) if (chunk.choices[0].delta.content) break;
    const cut = client.chat.completions.stream({ ...ask, max_tokens: 800 });
    cut.once("content", () => cut.abort());
    await assert.rejects(cut.done(), APIUserAbortError);
    const answers = await Promise.all(Array.from({ length: 8 }, () => client.chat.completions.create(ask)));
    assert.equal(new Set(answers.map((answer) => answer.choices[0].message.content)).size, 1);
  },
};

for (const [name, test] of Object.entries(tests)) {
  try {
    await test();
  } catch (error) {
    error.message = `${name}: ${error.message}`;
    throw error;
  }
  console.log(`  ${name}`);
}
console.log(`openai ${version("openai")} for Node (zod ${version("zod")}, Node ${process.versions.node}): ${Object.keys(tests).length} held`);
