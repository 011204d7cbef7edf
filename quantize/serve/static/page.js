"use strict";
// A chat with the server that sent this page. Nothing is loaded from elsewhere, nothing is stored.

const $ = (id) => document.getElementById(id);
const messages = [];
let model = null;
let running = null; // AbortController of the answer that is being made

function headers() {
  const key = $("key").value;
  return { "Content-Type": "application/json", ...(key ? { Authorization: `Bearer ${key}` } : {}) };
}

async function connect() {
  try {
    const reply = await fetch("/health");
    $("key-label").hidden = !(await reply.json()).key_required;
    if (!$("key-label").hidden && !$("key").value) {
      $("model").textContent = "needs an API key";
      return;
    }
    const found = await fetch("/v1/models", { headers: headers() });
    if (!found.ok) throw new Error((await found.json()).error.message);
    model = (await found.json()).data[0].id;
    $("model").textContent = model;
  } catch (error) {
    model = null;
    $("model").textContent = error.message;
  }
}

function element(kind, parent, text = "") {
  const made = document.createElement("div");
  made.className = kind;
  made.textContent = text;
  parent.append(made);
  return made;
}

function body() {
  const steps = $("steps").valueAsNumber;
  // A seed may have 64 bits, more than a number of JavaScript holds: it goes into the JSON as it is.
  const seed = $("seed").value.trim();
  const text = JSON.stringify({
    model,
    messages,
    stream: true,
    stream_options: { include_usage: true, include_drafts: true },
    chat_template_kwargs: { enable_thinking: $("thinking").checked },
    ...(steps ? { num_inference_steps: steps } : {}),
  });
  return seed ? `${text.slice(0, -1)},"seed":${seed}}` : text;
}

async function* chunks(reply) {
  const reader = reply.body.pipeThrough(new TextDecoderStream()).getReader();
  for (let rest = ""; ; ) {
    const { value, done } = await reader.read();
    if (done) return;
    const events = (rest + value).split("\n\n");
    rest = events.pop();
    for (const event of events) {
      const data = event.replace(/^data: /, "");
      if (data !== "[DONE]") yield JSON.parse(data);
    }
  }
}

function draw(canvas, facts, draft) {
  canvas.replaceChildren(
    ...draft.tokens.map((token, at) => {
      const span = document.createElement("span");
      span.className = draft.accepted[at] ? "sure" : "guess";
      span.textContent = /^<\S+>$/.test(token) ? "·" : token; // a control token: most of a canvas' end
      span.title = token;
      return span;
    }),
  );
  facts.textContent = `canvas ${draft.canvas + 1}, step ${draft.step}`;
}

async function answer() {
  const turn = element("turn model", $("chat"));
  const [thoughts, text, canvas, facts] = ["thoughts", "answer", "canvas", "facts"].map((kind) =>
    element(kind, turn),
  );
  canvas.setAttribute("aria-hidden", "true");
  text.setAttribute("aria-live", "polite");
  running = new AbortController();
  $("send").textContent = "Stop";
  const started = performance.now();
  try {
    const options = { method: "POST", headers: headers(), body: body(), signal: running.signal };
    const reply = await fetch("/v1/chat/completions", options);
    if (!reply.ok) throw new Error((await reply.json()).error.message);
    for await (const chunk of chunks(reply)) {
      if (chunk.error) throw new Error(chunk.error.message);
      if (chunk.draft) draw(canvas, facts, chunk.draft);
      for (const { delta, finish_reason } of chunk.choices) {
        thoughts.append(delta.reasoning_content ?? "");
        text.append(delta.content ?? "");
        if (delta.content || delta.reasoning_content || finish_reason) canvas.replaceChildren();
      }
      if (chunk.usage) facts.textContent = summary(chunk.usage, performance.now() - started);
      $("chat").scrollTop = $("chat").scrollHeight;
    }
    messages.push({ role: "assistant", content: text.textContent });
  } catch (error) {
    canvas.replaceChildren();
    facts.textContent = error.name === "AbortError" ? "stopped" : error.message;
    facts.classList.toggle("error", error.name !== "AbortError");
    messages.pop(); // the question stays on the page, but it was not answered
  } finally {
    running = null;
    $("send").textContent = "Send";
  }
}

function summary(usage, milliseconds) {
  const parts = [
    `${usage.completion_tokens} tokens`,
    `${usage.canvases} canvas${usage.canvases === 1 ? "" : "es"}`,
    `${usage.denoising_steps} steps`,
    `${usage.tokens_per_forward.toFixed(1)} tokens a forward`,
    `${(milliseconds / 1000).toFixed(2)} s`,
  ];
  return parts.join(" · ");
}

function dataUrl(file) {
  return new Promise((resolve, reject) => {
    const reader = new FileReader();
    reader.onload = () => resolve(reader.result);
    reader.onerror = () => reject(reader.error);
    reader.readAsDataURL(file);
  });
}

$("form").addEventListener("submit", async (event) => {
  event.preventDefault();
  if (running) return running.abort();
  const text = $("prompt").value.trim();
  const [picture] = $("picture").files;
  if (!text || !model) return;
  $("prompt").value = $("picture").value = "";
  document.querySelector(".hint")?.remove();
  element("turn you", $("chat"), picture ? `${text}\n[${picture.name}]` : text);
  let content = text;
  if (picture) {
    const image_url = { url: await dataUrl(picture) };
    content = [{ type: "image_url", image_url }, { type: "text", text }];
  }
  messages.push({ role: "user", content });
  answer();
});
$("prompt").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
    event.preventDefault();
    if (!running) $("form").requestSubmit();
  }
});
$("key").addEventListener("change", connect);
$("clear").addEventListener("click", () => {
  running?.abort();
  messages.length = 0;
  $("chat").replaceChildren();
  $("prompt").focus();
});
connect();
