"use strict";

const element = (id) => document.getElementById(id);
let running = null;

function show(state, isError) {
  element("state").textContent = state;
  element("state").classList.toggle("error", Boolean(isError));
}

function headers() {
  const key = element("key").value.trim();
  const all = { "Content-Type": "application/json" };
  if (key) all.Authorization = "Bearer " + key;
  return all;
}

async function checked(response) {
  if (response.ok) return response;
  let message = "status " + response.status;
  try {
    message = (await response.json()).error.message;
  } catch (error) {
    // The body is not JSON: the status is shown.
  }
  throw new Error(message);
}

async function connect() {
  try {
    const response = await checked(await fetch("v1/models", { headers: headers() }));
    const model = (await response.json()).data[0];
    element("model").textContent = model.id;
    element("chat-choice").hidden = !model.has_chat_template;
    show("Ready, up to " + model.max_model_len + " tokens");
  } catch (error) {
    show(error.message, true);
  }
}

function body() {
  const prompt = element("prompt").value;
  const isChat = element("chat").checked;
  const fields = {
    max_tokens: Number(element("tokens").value),
    temperature: Number(element("temperature").value),
    top_p: Number(element("top-p").value),
    stream: true,
  };
  if (element("seed").value !== "") fields.seed = Number(element("seed").value);
  if (isChat) fields.messages = [{ role: "user", content: prompt }];
  else fields.prompt = prompt;
  return [isChat ? "v1/chat/completions" : "v1/completions", JSON.stringify(fields)];
}

// Yields the content of each server-sent event of one line.
async function* events(response) {
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { done, value } = await reader.read();
    if (done) return;
    const parts = (rest + value).split("\n\n");
    rest = parts.pop();
    for (const part of parts) yield part.slice("data: ".length);
  }
}

async function generate() {
  const [path, content] = body();
  const prompt = document.createElement("span");
  prompt.className = "prompt";
  prompt.textContent = element("chat").checked ? "" : element("prompt").value;
  const text = document.createElement("span");
  element("result").replaceChildren(prompt, text);
  const options = { method: "POST", headers: headers(), body: content, signal: running.signal };
  const response = await checked(await fetch(path, options));
  let reason = null;
  for await (const event of events(response)) {
    if (event === "[DONE]") return reason;
    const update = JSON.parse(event);
    if (update.error) throw new Error(update.error.message);
    for (const choice of update.choices) {
      text.append(choice.delta ? choice.delta.content || "" : choice.text);
      reason = choice.finish_reason || reason;
    }
  }
  throw new Error("the connection ended before the text was complete");
}

element("form").addEventListener("submit", async (event) => {
  event.preventDefault();
  if (running) return;
  running = new AbortController();
  element("start").disabled = true;
  element("stop").disabled = false;
  show("Generating");
  try {
    const reason = await generate();
    show(reason === "length" ? "Complete: maximum length" : "Complete: the model ended the text");
  } catch (error) {
    show(error.name === "AbortError" ? "Stopped" : error.message, error.name !== "AbortError");
  } finally {
    running = null;
    element("start").disabled = false;
    element("stop").disabled = true;
  }
});
element("stop").addEventListener("click", () => running && running.abort());
element("key").addEventListener("change", connect);
connect();
