// Tries of OpenAI's package for JavaScript; the name of one is the argument. Fails by an exception.
import assert from "node:assert/strict";
import OpenAI from "openai";
import { zodResponseFormat } from "openai/helpers/zod";
import { z } from "zod";

const ai = new OpenAI({ baseURL: process.env.BASE_URL, apiKey: "any", maxRetries: 0 });
const model = process.env.MODEL;
const question = [{ role: "user", content: "How much is four plus two?" }];
const weather = {
  name: "get_weather",
  description: "Current weather",
  parameters: { type: "object", properties: { city: { type: "string" } }, required: ["city"] },
};

const tries = {
  chat: async () => {
    const answer = await ai.chat.completions.create({ model, messages: question });
    assert.match(answer.choices[0].message.content, /^Four plus two/);
  },
  "chat stream": async () => {
    const stream = ai.chat.completions.stream({ model, messages: question, stream_options: { include_usage: true } });
    let text = "";
    for await (const chunk of stream) text += chunk.choices[0]?.delta.content ?? "";
    assert.match(text, /^Four plus two/);
    assert.equal(await stream.finalContent(), text);
    assert.ok((await stream.totalUsage()).completion_tokens > 0);
  },
  "chat tools": async () => {
    const calls = [];
    const run = (city) => (calls.push(city), "sunny");
    const tools = [{ type: "function", function: { ...weather, parse: JSON.parse, function: run } }];
    const messages = [{ role: "user", content: "Weather in Bonn?" }];
    for (const stream of [false, true]) {
      const text = await ai.chat.completions.runTools({ model, messages, tools, stream }).finalContent();
      assert.match(text, /^The work is done/);
    }
    assert.deepEqual(calls, [{ city: "Bonn" }, { city: "Bonn" }]);
  },
  "chat structured": async () => {
    const messages = [{ role: "user", content: "Which city? Answer as JSON" }];
    const response_format = zodResponseFormat(z.object({ city: z.string() }), "city");
    const answer = await ai.chat.completions.parse({ model, messages, response_format });
    assert.deepEqual(answer.choices[0].message.parsed, { city: "Bonn" });
  },
  responses: async () => {
    const first = await ai.responses.create({ model, input: question[0].content });
    assert.match(first.output_text, /^Four plus two/);
    const stream = ai.responses.stream({ model, input: "And now?", previous_response_id: first.id });
    assert.equal((await stream.finalResponse()).status, "completed");
  },
  "responses tools": async () => {
    const input = [{ role: "user", content: "Weather in Bonn?" }];
    const tools = [{ type: "function", strict: false, ...weather }, { type: "web_search" }];
    const first = await ai.responses.create({ model, input, tools });
    const call = first.output.find((item) => item.type === "function_call");
    const output = { type: "function_call_output", call_id: call.call_id, output: "sunny" };
    const second = await ai.responses.create({ model, input: [...input, ...first.output, output], tools });
    assert.match(second.output_text, /^The work is done/);
  },
  embeddings: async () => {
    const input = ["A cat sits on the mat.", "A cat sits on the mat.", "Shares fell by two percent."];
    // The package asks for base64 by itself, and decodes it.
    const { data } = await ai.embeddings.create({ model: process.env.EMBEDDER, input });
    const product = (item) => item.embedding.reduce((sum, x, i) => sum + x * data[0].embedding[i], 0);
    const [same, other] = data.slice(1).map(product);
    assert.ok(other < 0.99 && 0.99 < same && same < 1.01, `${same} ${other}`);
  },
};
await tries[process.argv[2]]();
