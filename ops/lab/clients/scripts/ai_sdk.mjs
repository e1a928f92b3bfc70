// Tries of the AI SDK; the name of one is the argument. Fails by an exception.
import assert from "node:assert/strict";
import { createAnthropic } from "@ai-sdk/anthropic";
import { createOpenAI } from "@ai-sdk/openai";
import { generateText, stepCountIs, streamText, tool } from "ai";
import { z } from "zod";

const openai = createOpenAI({ baseURL: process.env.BASE_URL, apiKey: "any" });
const anthropic = createAnthropic({ baseURL: process.env.BASE_URL, apiKey: "any" });
const question = "How much is four plus two?";
const tools = {
  get_weather: tool({
    description: "Current weather",
    inputSchema: z.object({ city: z.string(), days: z.number().int().optional(), extra: z.record(z.string(), z.string()).optional() }),
    execute: async () => "sunny",
  }),
};

async function answer(model) {
  const { text } = await generateText({ model, prompt: question, maxRetries: 0 });
  assert.match(text, /^Four plus two/);
}

async function stream(model) {
  const { textStream } = streamText({ model, prompt: question, maxRetries: 0 });
  let text = "";
  for await (const part of textStream) text += part;
  assert.match(text, /^Four plus two/);
}

async function useTools(model) {
  const { text, steps } = await generateText({
    model, tools, prompt: "Weather in Bonn?", stopWhen: stepCountIs(3), maxRetries: 0,
  });
  assert.equal(steps.length, 2);
  assert.match(text, /^The work is done/);
}

const tries = {
  responses: () => answer(openai(process.env.MODEL)),
  "responses stream": () => stream(openai(process.env.MODEL)),
  "responses tools": () => useTools(openai(process.env.MODEL)),
  chat: () => answer(openai.chat(process.env.MODEL)),
  "chat tools": () => useTools(openai.chat(process.env.MODEL)),
  messages: () => answer(anthropic(process.env.MODEL)),
  "messages stream": () => stream(anthropic(process.env.MODEL)),
  "messages tools": () => useTools(anthropic(process.env.MODEL)),
};
await tries[process.argv[2]]();
