//! A stream says what the whole answer says, also where an answer is thoughts, text and calls: for every format,
//! any text, any cut.

use crate::equality::{Draws, append};
use crate::fake::{MARKERS, Play, Site, TOOL_TEMPLATE, answer, bytes, text_model_with};
use crate::tools::marked;
use atom_base::TokenId;
use atom_engine::Request;
use atom_text::{
    AnswerEnd, AnswerParser, AnswerPart, AnswerStart, Detokenizer, Dialect, ReasoningFormat, Tokenizer, Tool,
    ToolFormat,
};
use serde_json::{Map, Value, json};
use std::sync::Arc;

const CHAT: &str = "/v1/chat/completions";

/// How a family of models speaks.
#[derive(Clone, Copy)]
struct Speech {
    reasoning: Option<ReasoningFormat>,
    tools: ToolFormat,
    /// A call of `weather`, whole.
    call: &'static str,
    /// What its answers are made of, beside words.
    pieces: &'static [&'static str],
}

const SPEECHES: &[Speech] = &[
    Speech {
        reasoning: Some(ReasoningFormat::Think),
        tools: ToolFormat::Hermes,
        call: "<tool_call>\n{\"name\": \"weather\", \"arguments\": {\"city\": \"Zürich \\\"{}\\\"\"}}\n</tool_call>",
        pieces: &[
            "<think>",
            "</think>",
            "<tool_call>",
            "</tool_call>",
            "{\"name\": \"weather\"",
            "}}",
            "<tool_",
        ],
    },
    Speech {
        reasoning: Some(ReasoningFormat::Think),
        tools: ToolFormat::Qwen3Coder,
        call: "<tool_call>\n<function=weather>\n<parameter=city>\nZürich\n</parameter>\n</function>\n</tool_call>",
        pieces: &[
            "<think>",
            "</think>",
            "<tool_call>",
            "</tool_call>",
            "<function=weather>",
            "<parameter=city>",
        ],
    },
    Speech {
        reasoning: None,
        tools: ToolFormat::Llama3Json,
        call: "{\"name\": \"weather\", \"parameters\": {\"city\": \"Zürich\"}}",
        pieces: &["{\"name\": ", "{", "}", "<|python_tag|>", "; "],
    },
    Speech {
        reasoning: Some(ReasoningFormat::Mistral),
        tools: ToolFormat::Mistral,
        call: "[TOOL_CALLS][{\"name\": \"weather\", \"arguments\": {\"city\": \"Zürich\"}}]",
        pieces: &[
            "[TOOL_CALLS]",
            "[TOOL_CALLS]weather[ARGS]{\"city\": \"Bern\"}",
            "[THINK]",
            "[/THINK]",
            "[{",
            "]",
        ],
    },
    Speech {
        reasoning: Some(ReasoningFormat::Think),
        tools: ToolFormat::DeepseekV31,
        call: "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>weather<｜tool▁sep｜>{\"city\": \"Zürich\"}\
               <｜tool▁call▁end｜><｜tool▁calls▁end｜>",
        pieces: &[
            "<think>",
            "</think>",
            "<｜tool▁calls▁begin｜>",
            "<｜tool▁call▁begin｜>weather",
            "<｜tool▁calls▁end｜>",
        ],
    },
    Speech {
        reasoning: Some(ReasoningFormat::KimiK2),
        tools: ToolFormat::KimiK2,
        call: "<|tool_calls_section_begin|><|tool_call_begin|>functions.weather:0<|tool_call_argument_begin|>\
               {\"city\": \"Zürich\"}<|tool_call_end|><|tool_calls_section_end|>",
        pieces: &[
            "<think>",
            "</think>",
            "<|tool_calls_section_begin|>",
            "<|tool_call_end|>",
            "functions.weather:0",
        ],
    },
    Speech {
        reasoning: Some(ReasoningFormat::Think),
        tools: ToolFormat::Glm45,
        call: "<tool_call>weather\n<arg_key>city</arg_key>\n<arg_value>Zürich</arg_value>\n</tool_call>",
        pieces: &["<think>", "</think>", "<tool_call>weather", "<arg_key>", "</arg_value>", "</tool_call>"],
    },
    Speech {
        reasoning: Some(ReasoningFormat::Think),
        tools: ToolFormat::MinimaxM2,
        call: "<minimax:tool_call>\n<invoke name=\"weather\">\n<parameter name=\"city\">Zürich</parameter>\n</invoke>\n\
               </minimax:tool_call>",
        pieces: &["<think>", "</think>", "<minimax:tool_call>", "<invoke name=\"weather\">", "</invoke>"],
    },
    Speech {
        reasoning: Some(ReasoningFormat::Harmony),
        tools: ToolFormat::Harmony,
        call: "<|start|>assistant<|channel|>commentary to=functions.weather <|constrain|>json<|message|>\
               {\"city\": \"Zürich\"}<|call|>",
        pieces: &[
            "<|channel|>analysis<|message|>",
            "<|end|>",
            "<|channel|>final<|message|>",
            "<|start|>assistant",
        ],
    },
];

impl Speech {
    fn dialect(self) -> Dialect {
        Dialect { reasoning: self.reasoning, tools: Some(self.tools) }
    }

    /// The tokens of an answer: calls, words, and markers where they make no sense.
    fn tokens(self, seed: u64, choice: u32) -> Vec<TokenId> {
        let mut draws = Draws { seed: seed ^ (u64::from(choice) << 32), at: 0 };
        let mut text = String::new();
        for _ in 0..draws.below(7) {
            match draws.below(4) {
                0 => text.push_str(self.call),
                1 => text.push_str(draws.pick(self.pieces)),
                _ => text.push_str(draws.pick(&["ab", "é🦀", " \n", "<", "c ", "{\"a\": 1}", "stop"])),
            }
        }
        // Markers come as special tokens where the vocabulary has them.
        if self.tools == ToolFormat::Hermes { marked(&text) } else { bytes(&text) }
    }

    /// Plays the tokens, and lets them be read now and then.
    fn play(self, request: &Request) -> Vec<Play> {
        let mut draws = Draws { seed: request.id.0, at: 0 };
        let plays = answer(request, &self.tokens(request.sampling.seed, request.sampling.choice));
        let mut mixed = Vec::new();
        for play in plays {
            mixed.push(play);
            if draws.below(4) == 0 {
                mixed.extend([Play::Yield, Play::Yield]);
            }
        }
        mixed
    }
}

fn body(seed: u64) -> Value {
    let mut draws = Draws { seed: !seed, at: 0 };
    let mut body = Map::new();
    body.insert("seed".into(), seed.into());
    body.insert("n".into(), json!(1 + draws.below(2)));
    body.insert("max_tokens".into(), json!(1 + draws.below(400)));
    body.insert("messages".into(), json!([{"role": "user", "content": "x"}]));
    let weather = json!({"name": "weather", "parameters": {"properties": {"city": {"type": "string"}}}});
    body.insert("tools".into(), json!([{"type": "function", "function": weather}]));
    if draws.below(3) == 0 {
        body.insert("stop".into(), json!([draws.pick(&["stop", "🦀", "ab", "city", "</think>"])]));
    }
    if draws.below(3) == 0 {
        body.insert("parallel_tool_calls".into(), false.into());
    }
    if draws.below(4) == 0 {
        body.insert("include_reasoning".into(), false.into());
    }
    if draws.below(3) == 0 {
        body.insert("chat_template_kwargs".into(), json!({"enable_thinking": draws.below(2) == 0}));
    }
    if draws.below(2) == 0 {
        body.insert("logprobs".into(), true.into());
    }
    Value::Object(body)
}

/// What a choice must say, worked out from its whole text at once.
fn expected(speech: Speech, tokenizer: &Arc<Tokenizer>, body: &Value, choice: u32) -> (Value, &'static str) {
    let all = speech.tokens(body["seed"].as_u64().unwrap(), choice);
    let limit = body["max_tokens"].as_u64().unwrap() as usize;
    let mut detokenizer = Detokenizer::new(tokenizer.clone(), true).showing(&speech.dialect().markers());
    let mut text = String::new();
    for &token in &all[..all.len().min(limit)] {
        text.push_str(detokenizer.push(token));
    }
    text.push_str(detokenizer.finish());
    let stop = body["stop"][0].as_str().and_then(|stop| text.find(stop));
    let thinks = body["chat_template_kwargs"]["enable_thinking"] == true;
    let is_think = matches!(speech.reasoning, Some(ReasoningFormat::Think | ReasoningFormat::KimiK2));
    let start = if thinks && is_think { AnswerStart::Reasoning } else { AnswerStart::Content };
    let tool = Tool {
        name: "weather".into(),
        description: None,
        parameters: body["tools"][0]["function"]["parameters"].clone(),
        strict: false,
    };
    let mut parser = AnswerParser::new(speech.dialect(), start, [tool].into());
    let mut parts = Vec::new();
    parser.push(&text[..stop.unwrap_or(text.len())], &mut parts);
    let by_itself = stop.is_none() && all.len() < limit;
    parser.finish(if by_itself { AnswerEnd::Whole } else { AnswerEnd::Cut }, &mut parts);
    let is_second = |part: &AnswerPart| matches!(part, AnswerPart::Call { index: 1.., .. });
    let second = parts.iter().position(is_second).filter(|_| body["parallel_tool_calls"] == false);
    parts.truncate(second.unwrap_or(parts.len()));
    let calls = parts.iter().any(|part| matches!(part, AnswerPart::Call { .. }));
    let finish = match (second.is_some(), stop.is_some() || all.len() < limit) {
        (true, _) => "tool_calls",
        (false, true) if calls && !(stop.is_some() && parser.is_call_cut()) => "tool_calls",
        (false, true) => "stop",
        (false, false) => "length",
    };
    (message(&parts, body["include_reasoning"] != false), finish)
}

fn message(parts: &[AnswerPart], with_reasoning: bool) -> Value {
    let mut said = Said::default();
    for part in parts {
        match part {
            AnswerPart::Content(text) => said.content.push_str(text),
            AnswerPart::Reasoning(text) if with_reasoning => said.reasoning.push_str(text),
            AnswerPart::Reasoning(_) => {}
            AnswerPart::Call { name, .. } => said.calls.push((name.clone(), String::new())),
            AnswerPart::Arguments { index, json } => said.calls[*index as usize].1.push_str(json),
        }
    }
    said.message()
}

/// A message as it grows.
#[derive(Default)]
struct Said {
    content: String,
    reasoning: String,
    calls: Vec<(String, String)>,
    ids: Vec<String>,
}

impl Said {
    /// As the whole answer has it, without the calls' ids.
    fn message(&self) -> Value {
        let is_silent = self.content.is_empty() && !self.calls.is_empty();
        let mut message = json!({"role": "assistant", "content": (!is_silent).then_some(&self.content)});
        if !self.reasoning.is_empty() {
            message["reasoning_content"] = self.reasoning.as_str().into();
        }
        if !self.calls.is_empty() {
            let call = |(name, arguments): &(String, String)| json!({"type": "function", "function": {"name": name, "arguments": arguments}});
            message["tool_calls"] = self.calls.iter().map(call).collect();
        }
        message
    }

    fn push(&mut self, delta: &Value) {
        for (name, value) in delta.as_object().unwrap() {
            match name.as_str() {
                "content" => self.content.push_str(value.as_str().unwrap()),
                "reasoning_content" => self.reasoning.push_str(value.as_str().unwrap()),
                "role" => assert_eq!(*delta, json!({"role": "assistant", "content": ""})),
                "tool_calls" => value.as_array().unwrap().iter().for_each(|call| self.push_call(call)),
                _ => panic!("{name} in {delta}"),
            }
        }
    }

    fn push_call(&mut self, call: &Value) {
        let index = call["index"].as_u64().unwrap() as usize;
        let arguments = call["function"]["arguments"].as_str().unwrap();
        if index == self.calls.len() {
            assert_eq!((call["type"].as_str(), arguments), (Some("function"), ""), "{call}");
            self.ids.push(call["id"].as_str().unwrap().to_owned());
            self.calls.push((call["function"]["name"].as_str().unwrap().to_owned(), String::new()));
        } else {
            assert_eq!(*call, json!({"index": index, "function": {"arguments": arguments}}));
            assert_eq!(index + 1, self.calls.len(), "arguments of a call that is over: {call}");
            self.calls[index].1.push_str(arguments);
        }
    }
}

/// The choices of a stream as the whole answer has them, and the usage.
fn assemble(chunks: &[Value]) -> (Vec<Value>, Value) {
    let (last, chunks) = chunks.split_last().unwrap();
    assert_eq!(last["choices"], json!([]), "the usage comes last");
    let mut said: Vec<(Said, Value, Value)> = Vec::new();
    for chunk in chunks {
        let [part] = chunk["choices"].as_array().unwrap().as_slice() else { panic!("{chunk}") };
        let index = part["index"].as_u64().unwrap() as usize;
        while said.len() <= index {
            said.push((Said::default(), Value::Null, Value::Null));
        }
        let (choice, logprobs, finish) = &mut said[index];
        assert_eq!(*finish, Value::Null, "a chunk behind the end of choice {index}");
        choice.push(&part["delta"]);
        append(logprobs, &part["logprobs"]);
        *finish = part["finish_reason"].clone();
    }
    let roles = chunks.iter().filter(|chunk| chunk["choices"][0]["delta"].get("role").is_some());
    assert_eq!(roles.count(), said.len(), "each choice says its role once");
    let choice = |(at, (said, logprobs, finish)): (usize, &(Said, Value, Value))| json!({"index": at, "message": said.message(), "logprobs": logprobs, "finish_reason": finish});
    (said.iter().enumerate().map(choice).collect(), last["usage"].clone())
}

/// Takes the ids out of a message's calls.
fn take_ids(message: &mut Value) -> Vec<String> {
    let calls = message.get_mut("tool_calls").and_then(Value::as_array_mut).into_iter().flatten();
    calls
        .map(|call| call.as_object_mut().unwrap().remove("id").unwrap().as_str().unwrap().to_owned())
        .collect()
}

async fn check(speech: Speech) {
    let markers: &[&str] = if speech.tools == ToolFormat::Hermes { &MARKERS } else { &[] };
    let text = text_model_with(TOOL_TEMPLATE, speech.dialect(), markers);
    let tokenizer = text.tokenizer.clone();
    let site = Site::start_model(move |request| speech.play(request), text, |_| {}).await;
    let mut client = site.client().await;
    let (mut calls, mut thoughts, mut cuts) = (0, 0, 0);
    for seed in 0..150 {
        let mut body = body(seed);
        let whole = client.post(CHAT, &body).await;
        let name = speech.tools.name();
        assert_eq!(whole.status, 200, "{name} {body}: {}", whole.text());
        let mut whole = whole.json();
        for choice in whole["choices"].as_array_mut().unwrap() {
            let index = choice["index"].as_u64().unwrap() as u32;
            let ids = take_ids(&mut choice["message"]);
            assert!(ids.iter().all(|id| !id.is_empty()));
            let (message, finish) = expected(speech, &tokenizer, &body, index);
            assert_eq!(choice["message"], message, "{name} {body}");
            assert_eq!(choice["finish_reason"], finish, "{name} {body}");
            calls += ids.len();
            thoughts += usize::from(message.get("reasoning_content").is_some());
            cuts += usize::from(finish == "length");
        }
        body["stream"] = true.into();
        body["stream_options"] = json!({"include_usage": true});
        let (choices, usage) = assemble(&client.post(CHAT, &body).await.chunks());
        assert_eq!(Value::Array(choices), whole["choices"], "{name} {body}");
        assert_eq!(usage, whole["usage"], "{name} {body}");
    }
    assert!(calls > 20 && cuts > 5, "{}: {calls} calls, {cuts} cuts test nothing", speech.tools.name());
    assert!(thoughts > 5 || speech.reasoning.is_none(), "{}: {thoughts} thoughts", speech.tools.name());
}

#[tokio::test]
async fn streamed_parts_equal_the_whole_and_the_reference_in_every_format() {
    for speech in SPEECHES {
        check(*speech).await;
    }
}
