// Tries of Anthropic's package for JavaScript; the name of one is the argument. Fails by an exception.
import assert from "node:assert/strict";
import Anthropic from "@anthropic-ai/sdk";

const ai = new Anthropic({ baseURL: process.env.ROOT_URL, apiKey: "any", maxRetries: 0 });
const body = {
  model: process.env.MODEL,
  max_tokens: 200,
  messages: [{ role: "user", content: "How much is four plus two?" }],
};
const input_schema = { type: "object", properties: { city: { type: "string" } }, required: ["city"] };
const tools = [{ name: "get_weather", description: "Current weather", input_schema }];

const tries = {
  message: async () => {
    const answer = await ai.messages.create(body);
    assert.match(answer.content[0].text, /^Four plus two/);
  },
  stream: async () => {
    let text = "";
    const stream = ai.messages.stream(body).on("text", (part) => (text += part));
    const whole = await stream.finalMessage();
    assert.equal(whole.content[0].text, text);
    assert.match(text, /^Four plus two/);
  },
  tools: async () => {
    const messages = [{ role: "user", content: "Weather in Bonn?" }];
    const answer = await ai.messages.stream({ ...body, messages, tools }).finalMessage();
    const call = answer.content.find((block) => block.type === "tool_use");
    assert.deepEqual(call.input, { city: "Bonn" });
    const result = { type: "tool_result", tool_use_id: call.id, content: "sunny" };
    const turns = [...messages, { role: "assistant", content: answer.content }, { role: "user", content: [result] }];
    const last = await ai.messages.create({ ...body, messages: turns, tools });
    assert.match(last.content[0].text, /^The work is done/);
  },
};
await tries[process.argv[2]]();
