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

// Reads ahead of what is shown, so that slow motion holds up neither the server nor the clock.
async function* ahead(source, signal) {
  const got = [];
  let [ended, failure, wake] = [false, null, () => {}];
  (async () => {
    try {
      for await (const chunk of source) wake(got.push({ chunk, at: performance.now() }));
    } catch (error) {
      failure = error;
    }
    wake((ended = true));
  })();
  for (;;) {
    if (signal.aborted) throw new DOMException("stopped", "AbortError");
    if (got.length) yield got.shift();
    else if (failure) throw failure;
    else if (ended) return;
    else await new Promise((go) => (wake = go));
  }
}

// These two are also in a saved page: they know nothing of this one.
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

async function play(canvas, facts, frames, pace, goes) {
  for (const frame of frames) {
    if (!goes()) return;
    draw(canvas, facts, frame);
    await new Promise((go) => setTimeout(go, pace));
  }
}

function saved(question, text, frames) {
  const told = JSON.stringify({ question, text, frames }).replaceAll("<", "\\u003c");
  const rules = [...document.styleSheets[0].cssRules].map((rule) => rule.cssText).join("\n");
  return `<!doctype html><html lang="en"><meta charset="utf-8"><title>A canvas, denoised</title>
<meta name="viewport" content="width=device-width, initial-scale=1"><style>${rules}
body { height: auto; padding: 1rem; }</style>
<main><h1>A canvas, denoised</h1><div class="turn you"></div><div class="turn model"><div class="answer"></div>
<div class="canvas"></div><div class="facts"></div></div><button type="button">Replay</button></main>
<script>${draw}\n${play}\nconst told = ${told};
const [you, answer, canvas, facts, again] = [".you", ".answer", ".canvas", ".facts", "button"].map(
  (name) => document.querySelector(name));
you.textContent = told.question;
again.onclick = async () => {
  again.disabled = true;
  answer.textContent = "";
  await play(canvas, facts, told.frames, 150, () => true);
  canvas.replaceChildren();
  answer.textContent = told.text;
  again.disabled = false;
};
again.onclick();
<${""}/script></html>`;
}

function button(parent, text, act) {
  const made = document.createElement("button");
  made.type = "button";
  made.textContent = text;
  made.addEventListener("click", act);
  parent.append(made);
  return made;
}

function offer(turn, question, frames) {
  const [thoughts, text, canvas, facts] = turn.children;
  const told = facts.textContent;
  let playing = false;
  const tools = element("tools", turn);
  const again = button(tools, "Replay", async () => {
    playing = !playing;
    if (!playing) return;
    again.textContent = "Stop";
    thoughts.hidden = text.hidden = true;
    await play(canvas, facts, frames, Number($("pace").value) || 150, () => playing);
    playing = thoughts.hidden = text.hidden = false;
    canvas.replaceChildren();
    facts.textContent = told;
    again.textContent = "Replay";
  });
  button(tools, "Save as a page", () => {
    const link = document.createElement("a");
    const page = new Blob([saved(question, text.textContent, frames)], { type: "text/html" });
    link.href = URL.createObjectURL(page);
    link.download = "canvas.html";
    link.click();
    setTimeout(() => URL.revokeObjectURL(link.href), 1000);
  });
}

async function answer(question) {
  const turn = element("turn model", $("chat"));
  const [thoughts, text, canvas, facts] = ["thoughts", "answer", "canvas", "facts"].map((kind) =>
    element(kind, turn),
  );
  canvas.setAttribute("aria-hidden", "true");
  text.setAttribute("aria-live", "polite");
  running = new AbortController();
  $("send").textContent = "Stop";
  const [started, frames] = [performance.now(), []];
  try {
    const options = { method: "POST", headers: headers(), body: body(), signal: running.signal };
    const reply = await fetch("/v1/chat/completions", options);
    if (!reply.ok) throw new Error((await reply.json()).error.message);
    for await (const { chunk, at } of ahead(chunks(reply), running.signal)) {
      if (chunk.error) throw new Error(chunk.error.message);
      if (chunk.draft) {
        frames.push(chunk.draft);
        await play(canvas, facts, [chunk.draft], Number($("pace").value), () => true);
      }
      for (const { delta, finish_reason } of chunk.choices) {
        thoughts.append(delta.reasoning_content ?? "");
        text.append(delta.content ?? "");
        if (delta.content || delta.reasoning_content || finish_reason) canvas.replaceChildren();
      }
      if (chunk.usage) facts.textContent = summary(chunk.usage, at - started);
      $("chat").scrollTop = $("chat").scrollHeight;
    }
    messages.push({ role: "assistant", content: text.textContent });
    if (frames.length) offer(turn, question, frames);
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
  if (usage.ignored_parameters.length) parts.push(`ignored: ${usage.ignored_parameters.join(", ")}`);
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
  answer(text);
});
$("prompt").addEventListener("keydown", (event) => {
  if (event.key === "Enter" && !event.shiftKey && !event.isComposing) {
    event.preventDefault();
    if (!running) $("form").requestSubmit();
  }
});
for (const example of document.querySelectorAll(".examples button"))
  example.addEventListener("click", () => {
    $("prompt").value = example.textContent;
    $("form").requestSubmit();
    $("prompt").focus();
  });
$("key").addEventListener("change", connect);
$("clear").addEventListener("click", () => {
  running?.abort();
  messages.length = 0;
  $("chat").replaceChildren();
  $("prompt").focus();
});
connect();
