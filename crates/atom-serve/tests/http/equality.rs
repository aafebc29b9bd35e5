//! A stream says what the whole answer says, for any tokens, stop strings and choices.

use crate::fake::{Site, answer, text_model};
use atom_base::{TokenId, rng};
use atom_text::{Detokenizer, Tokenizer};
use serde_json::{Map, Value, json};
use std::sync::Arc;

/// Draws that are the same in every run.
pub(crate) struct Draws {
    pub(crate) seed: u64,
    pub(crate) at: u32,
}

impl Draws {
    pub(crate) fn below(&mut self, end: usize) -> usize {
        self.at += 1;
        (rng::uniform(self.seed, 9, self.at, 0) * end as f32) as usize
    }

    pub(crate) fn pick<T: Copy>(&mut self, from: &[T]) -> T {
        from[self.below(from.len())]
    }
}

/// The tokens that the engine plays for a choice: few letters, so that stop strings are hit often, whole
/// and broken multi-byte characters, special tokens, and ids that the tokenizer doesn't know.
pub(crate) fn tokens(seed: u64, choice: u32) -> Vec<TokenId> {
    let mut draws = Draws { seed: seed ^ (u64::from(choice) << 32), at: 0 };
    let mut tokens = Vec::new();
    for _ in 0..draws.below(30) {
        match draws.below(8) {
            0 => tokens.extend("é".bytes().map(TokenId::from)),
            1 => tokens.extend("🦀".bytes().map(TokenId::from)),
            2 => tokens.push(draws.pick(&[0xC3, 0xF0, 0x9F, 0xA9, 0xFF])),
            3 => tokens.push(draws.pick(&[256, 258, 261])),
            _ => tokens.push(draws.pick(&[97, 98, 99])),
        }
    }
    tokens
}

fn body(seed: u64, plain: bool) -> Value {
    let mut draws = Draws { seed: !seed, at: 0 };
    let mut body = Map::new();
    body.insert("seed".into(), seed.into());
    body.insert("n".into(), json!(1 + draws.below(3)));
    body.insert("max_tokens".into(), json!(1 + draws.below(40)));
    let stops: Vec<_> = (0..draws.below(3))
        .map(|_| draws.pick(&["a", "ab", "aab", "bé", "é", "🦀b", "cc", "\u{FFFD}", "abc"]))
        .collect();
    if !stops.is_empty() {
        body.insert("stop".into(), json!(stops));
    }
    let scored = draws.below(2) == 1;
    if plain {
        body.insert("prompt".into(), draws.pick(&["p", "", "né"]).into());
        body.insert("echo".into(), json!(draws.below(2) == 1));
        if scored {
            body.insert("logprobs".into(), json!(draws.below(3)));
        }
    } else {
        body.insert("messages".into(), json!([{"role": "user", "content": "x"}]));
        if scored {
            body.insert("logprobs".into(), true.into());
            body.insert("top_logprobs".into(), json!(draws.below(3)));
        }
    }
    Value::Object(body)
}

/// Puts the chunks of a stream together again: the choices of the whole answer, and its usage.
fn assemble(chunks: &[Value], plain: bool) -> (Vec<Value>, Value) {
    let (last, chunks) = chunks.split_last().unwrap();
    assert_eq!(last["choices"], json!([]), "the usage comes last");
    let mut choices: Vec<Value> = Vec::new();
    for chunk in chunks {
        assert_eq!(chunk["id"], last["id"]);
        assert_eq!(chunk["usage"], Value::Null);
        let [part] = chunk["choices"].as_array().unwrap().as_slice() else {
            panic!("one choice a chunk: {chunk}")
        };
        let index = part["index"].as_u64().unwrap() as usize;
        while choices.len() <= index {
            choices.push(json!({"index": choices.len(), "text": "", "opened": plain, "logprobs": null, "finish_reason": null}));
        }
        let choice = &mut choices[index];
        assert_eq!(choice["finish_reason"], Value::Null, "a chunk behind the end of choice {index}");
        if part["delta"]["role"] == "assistant" {
            assert_eq!(part["delta"], json!({"role": "assistant", "content": ""}));
            assert_eq!(choice["opened"], false, "the role is said once");
            choice["opened"] = true.into();
        }
        assert_eq!(choice["opened"], true, "the role comes first");
        let delta = if plain { &part["text"] } else { &part["delta"]["content"] };
        choice["text"] =
            format!("{}{}", choice["text"].as_str().unwrap(), delta.as_str().unwrap_or_default()).into();
        append(&mut choice["logprobs"], &part["logprobs"]);
        choice["finish_reason"] = part["finish_reason"].clone();
    }
    for choice in &mut choices {
        choice.as_object_mut().unwrap().remove("opened");
    }
    (choices, last["usage"].clone())
}

/// Joins objects of lists list by list.
pub(crate) fn append(all: &mut Value, more: &Value) {
    if all.is_null() {
        *all = more.clone();
    } else if let Some(more) = more.as_object() {
        for (name, list) in more {
            all[name].as_array_mut().unwrap().extend(list.as_array().unwrap().iter().cloned());
        }
    }
}

/// The choice as it must come out, worked out from the whole text at once.
fn expected(tokenizer: &Arc<Tokenizer>, body: &Value, choice: u32) -> (String, &'static str, usize) {
    let all = tokens(body["seed"].as_u64().unwrap(), choice);
    let limit = body["max_tokens"].as_u64().unwrap() as usize;
    let tokens = &all[..all.len().min(limit)];
    let text = tokenizer.decode(tokens, true);
    let stops: Vec<&str> =
        body["stop"].as_array().into_iter().flatten().map(|stop| stop.as_str().unwrap()).collect();
    let ends = text.char_indices().map(|(at, character)| at + character.len_utf8());
    let found = ends.map(|end| &text[..end]).find_map(|seen| {
        let longest = stops.iter().filter(|stop| seen.ends_with(**stop)).max_by_key(|stop| stop.len())?;
        Some((seen.len(), seen.len() - longest.len()))
    });
    let Some((end, cut)) = found else {
        return (text, if all.len() < limit { "stop" } else { "length" }, tokens.len());
    };
    // The token that brings the last character of the stop string is the last one that counts.
    let mut detokenizer = Detokenizer::new(tokenizer.clone(), true);
    let mut seen = 0;
    let count = tokens.iter().position(|&token| {
        seen += detokenizer.push(token).len();
        seen >= end
    });
    (text[..cut].to_owned(), "stop", count.map_or(tokens.len(), |at| at + 1))
}

async fn check(plain: bool) {
    let site =
        Site::start(|request| answer(request, &tokens(request.sampling.seed, request.sampling.choice))).await;
    let path = if plain { "/v1/completions" } else { "/v1/chat/completions" };
    let tokenizer = text_model().tokenizer;
    let mut client = site.client().await;
    let mut stopped = 0;
    for seed in 0..400 {
        let mut body = body(seed, plain);
        let whole = client.post(path, &body).await;
        assert_eq!(whole.status, 200, "{body}: {}", whole.text());
        let whole = whole.json();
        let mut generated = 0;
        for choice in whole["choices"].as_array().unwrap() {
            let (text, finish, count) = expected(&tokenizer, &body, choice["index"].as_u64().unwrap() as u32);
            let echo = if body["echo"] == true { body["prompt"].as_str().unwrap() } else { "" };
            let found = if plain { &choice["text"] } else { &choice["message"]["content"] };
            assert_eq!(*found, format!("{echo}{text}"), "{body}");
            assert_eq!(choice["finish_reason"], finish, "{body}");
            stopped += usize::from(body.get("stop").is_some() && finish == "stop");
            generated += count;
        }
        assert_eq!(whole["usage"]["completion_tokens"], generated, "{body}");

        body["stream"] = true.into();
        body["stream_options"] = json!({"include_usage": true});
        let (choices, usage) = assemble(&client.post(path, &body).await.chunks(), plain);
        assert_eq!(usage, whole["usage"], "{body}");
        for (streamed, whole) in choices.iter().zip(whole["choices"].as_array().unwrap()) {
            let text = if plain { &whole["text"] } else { &whole["message"]["content"] };
            let whole = json!({
                "index": whole["index"], "text": text, "logprobs": whole["logprobs"], "finish_reason": whole["finish_reason"],
            });
            assert_eq!(*streamed, whole, "{body}");
        }
        assert_eq!(choices.len(), whole["choices"].as_array().unwrap().len());
    }
    assert!(stopped > 50, "the scripts must hit stop strings, or they test nothing: {stopped}");
}

#[tokio::test]
async fn a_streamed_chat_equals_the_whole_one_and_the_reference() {
    check(false).await;
}

#[tokio::test]
async fn a_streamed_completion_equals_the_whole_one_and_the_reference() {
    check(true).await;
}
