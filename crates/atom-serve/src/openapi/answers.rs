//! Schemas of what is answered. Clients must expect fields that are not here; the tests don't: they close every
//! object and hold all answers to it.

use super::refer;
use serde_json::{Map, Value, json};

/// The components, by name.
pub(super) fn schemas() -> impl Iterator<Item = (String, Value)> {
    let all = [errors(), chat(), completions(), responses(), messages(), tokens(), server()];
    all.into_iter().flat_map(|schemas| match schemas {
        Value::Object(map) => map,
        _ => unreachable!("components have names"),
    })
}

fn errors() -> Value {
    json!({
        "Error": object(json!({"error": object(json!({
            "message": text(), "type": words(&["invalid_request_error", "rate_limit_error", "server_error"]),
            "param": or_null(text()), "code": or_null(text()),
        }))})),
        "MessagesError": object(json!({
            "type": only("error"),
            "error": object(json!({"type": words(&[
                "invalid_request_error", "authentication_error", "permission_error", "not_found_error",
                "request_too_large", "rate_limit_error", "overloaded_error", "timeout_error", "api_error",
            ]), "message": text()})),
            "request_id": text(),
        })),
    })
}

fn chat() -> Value {
    let call = |rest: &[(&str, Value)]| object(with(json!({"id": text(), "type": only("function")}), rest));
    let function = object(json!({"name": text(), "arguments": text()}));
    let logprob = json!({"token": text(), "logprob": number(), "bytes": list(byte())});
    json!({
        "ChatCompletion": object(with(envelope("chat.completion"), &[
            ("choices", list(object(json!({
                "index": count(), "message": refer("ChatAnswer"), "logprobs": or_null(refer("ChatLogprobs")),
                "finish_reason": finish(),
            })))),
            ("usage", refer("Usage")),
        ])),
        "ChatAnswer": object(json!({
            "role": only("assistant"), "content": or_null(text()), "reasoning_content?": text(),
            "tool_calls?": list(call(&[("function", function)])),
        })),
        "ChatCompletionChunk": any_of([object(with(envelope("chat.completion.chunk"), &[
            ("choices", list(object(json!({
                "index": count(), "delta": refer("ChatDelta"), "logprobs": or_null(refer("ChatLogprobs")),
                "finish_reason": or_null(finish()),
            })))),
            ("usage?", or_null(refer("Usage"))),
        ])), refer("Error"), done()]),
        "ChatDelta": object(json!({
            "role?": only("assistant"), "content?": text(), "reasoning_content?": text(),
            "tool_calls?": list(object(json!({
                "index": count(), "id?": text(), "type?": only("function"),
                "function": object(json!({"name?": text(), "arguments": text()})),
            }))),
        })),
        "ChatLogprobs": object(json!({
            "content": list(object(with(logprob.clone(), &[("top_logprobs", list(object(logprob)))]))),
        })),
        "Usage": object(json!({
            "prompt_tokens": count(), "completion_tokens": count(), "total_tokens": count(),
            "prompt_tokens_details": object(json!({"cached_tokens": count()})),
            "completion_tokens_details?": object(json!({"reasoning_tokens": count()})),
        })),
    })
}

fn completions() -> Value {
    let choice = |finish: Value| {
        list(object(json!({
            "index": count(), "text": text(), "logprobs": or_null(refer("CompletionLogprobs")),
            "finish_reason": finish,
        })))
    };
    let (whole, chunk) = (choice(finish()), choice(or_null(finish())));
    json!({
        "Completion": object(with(envelope("text_completion"), &[("choices", whole), ("usage", refer("Usage"))])),
        "CompletionChunk": any_of([
            object(with(envelope("text_completion"), &[
                ("choices", chunk), ("usage?", or_null(refer("Usage"))),
            ])),
            refer("Error"),
            done(),
        ]),
        "CompletionLogprobs": object(json!({
            "tokens": list(text()), "token_logprobs": list(or_null(number())),
            "top_logprobs": list(or_null(json!({"type": "object", "additionalProperties": number()}))),
            "text_offset": list(count()),
        })),
    })
}

fn responses() -> Value {
    let status = || words(&["in_progress", "completed", "incomplete"]);
    let output_text = object(json!({
        "type": only("output_text"), "text": text(), "annotations": empty(), "logprobs": empty(),
    }));
    let reasoning_text = object(json!({"type": only("reasoning_text"), "text": text()}));
    let event = |name: &str, rest: &[(&str, Value)]| {
        object(with(json!({"type": only(name), "sequence_number": count()}), rest))
    };
    let place = || [("item_id", text()), ("output_index", count()), ("content_index", count())];
    let in_item = |name: &str, rest: &[(&str, Value)]| event(name, &[&place()[..], rest].concat());
    let in_call = |name: &str, rest: &[(&str, Value)]| event(name, &[&place()[..2], rest].concat());
    let whole = |name: &str| event(name, &[("response", refer("Response"))]);
    let item = |name: &str| event(name, &[("output_index", count()), ("item", refer("ResponseItem"))]);
    let call = |name: &str, takes: &str| {
        object(with(
            json!({
                "id": text(), "type": only(name), "status": status(), "call_id": text(), "name": text(),
                "namespace?": text(),
            }),
            &[(takes, text())],
        ))
    };
    let part = || any_of([output_text.clone(), reasoning_text.clone()]);
    json!({
        "Response": object(json!({
            "id": text(), "object": only("response"), "created_at": count(),
            "status": words(&["in_progress", "completed", "incomplete", "failed"]),
            "error": or_null(object(json!({"code": text(), "message": text()}))),
            "incomplete_details": or_null(object(json!({"reason": only("max_output_tokens")}))),
            "output": list(refer("ResponseItem")), "usage": or_null(refer("ResponseUsage")),
            "model": text(), "user?": text(), "safety_identifier?": text(), "prompt_cache_key?": text(),
            "metadata": any_object(), "tools": list(any_object()),
            "tool_choice": json!({"type": ["string", "object"]}), "parallel_tool_calls": flag(),
            "reasoning": object(json!({"effort": or_null(text()), "summary": {"type": "null"}})),
            "text": object(json!({"format": any_object()})), "instructions": or_null(text()),
            "max_output_tokens": or_null(count()), "temperature": number(), "top_p": number(),
            "background": {"const": false}, "previous_response_id": {"type": "null"},
            "service_tier": only("default"), "store": {"const": false}, "top_logprobs": {"const": 0},
            "truncation": only("disabled"),
        })),
        "ResponseUsage": object(json!({
            "input_tokens": count(), "output_tokens": count(), "total_tokens": count(),
            "input_tokens_details": object(json!({"cached_tokens": count(), "cache_write_tokens": count()})),
            "output_tokens_details": object(json!({"reasoning_tokens": count()})),
        })),
        "ResponseItem": any_of([
            object(json!({
                "id": text(), "type": only("message"), "status": status(), "role": only("assistant"),
                "content": list(output_text.clone()),
            })),
            object(json!({
                "id": text(), "type": only("reasoning"), "status": status(), "summary": empty(),
                "content": list(reasoning_text.clone()),
            })),
            call("function_call", "arguments"), call("custom_tool_call", "input"),
        ]),
        "ResponseEvent": any_of([
            whole("response.created"), whole("response.in_progress"), whole("response.completed"),
            whole("response.incomplete"), whole("response.failed"),
            item("response.output_item.added"), item("response.output_item.done"),
            in_item("response.content_part.added", &[("part", part())]),
            in_item("response.content_part.done", &[("part", part())]),
            in_item("response.output_text.delta", &[("delta", text()), ("logprobs", empty())]),
            in_item("response.output_text.done", &[("text", text()), ("logprobs", empty())]),
            in_item("response.reasoning_text.delta", &[("delta", text())]),
            in_item("response.reasoning_text.done", &[("text", text())]),
            in_call("response.function_call_arguments.delta", &[("delta", text())]),
            in_call("response.function_call_arguments.done", &[("arguments", text()), ("name", text())]),
            in_call("response.custom_tool_call_input.delta", &[("delta", text())]),
            in_call("response.custom_tool_call_input.done", &[("input", text())]),
        ]),
    })
}

fn messages() -> Value {
    let reasons = ["end_turn", "max_tokens", "stop_sequence", "tool_use", "model_context_window_exceeded"];
    let stop = || [("stop_reason", or_null(words(&reasons))), ("stop_sequence", or_null(text()))];
    let event = |name: &str, rest: &[(&str, Value)]| object(with(json!({"type": only(name)}), rest));
    json!({
        "Message": object(with(json!({
            "id": text(), "type": only("message"), "role": only("assistant"), "model": text(),
            "content": list(refer("MessageBlock")), "usage": refer("MessageUsage"),
        }), &stop())),
        "MessageBlock": any_of([
            event("text", &[("text", text())]),
            event("thinking", &[("thinking", text()), ("signature", text())]),
            event("tool_use", &[("id", text()), ("name", text()), ("input", any_object())]),
        ]),
        "MessageUsage": object(json!({
            "input_tokens": count(), "cache_creation_input_tokens": count(), "cache_read_input_tokens": count(),
            "output_tokens": count(), "output_tokens_details?": object(json!({"thinking_tokens": count()})),
        })),
        "MessageEvent": any_of([
            event("message_start", &[("message", refer("Message"))]),
            event("ping", &[]),
            event("content_block_start", &[("index", count()), ("content_block", refer("MessageBlock"))]),
            event("content_block_delta", &[("index", count()), ("delta", any_of([
                event("text_delta", &[("text", text())]),
                event("thinking_delta", &[("thinking", text())]),
                event("signature_delta", &[("signature", text())]),
                event("input_json_delta", &[("partial_json", text())]),
            ]))]),
            event("content_block_stop", &[("index", count())]),
            event("message_delta", &[
                ("delta", object(with(json!({}), &stop()))), ("usage", refer("MessageUsage")),
            ]),
            event("message_stop", &[]),
            refer("MessagesError"),
        ]),
    })
}

fn tokens() -> Value {
    json!({
        "CountedTokens": object(json!({"input_tokens": count()})),
        "Tokens": object(json!({
            "count": count(), "max_model_len": count(), "tokens": list(count()),
            "token_strs": or_null(list(text())),
        })),
        "TokenizerInfo": object(json!({
            "bos_token": or_null(text()), "eos_token": or_null(text()), "unk_token": or_null(text()),
            "pad_token": or_null(text()), "add_bos_token": flag(), "model_max_length": count(),
            "chat_template": text(),
        })),
        "Detokenized": object(json!({"prompt": text()})),
        "Rendered": object(json!({
            "request_id": text(), "model": text(), "token_ids": list(count()), "max_tokens": count(),
        })),
        "RenderedPrompts": list(refer("Rendered")),
    })
}

fn server() -> Value {
    let condition = || words(&["ok", "unready", "stalled"]);
    json!({
        "Model": object(json!({
            "id": text(), "object": only("model"), "created": count(), "owned_by": text(), "root": text(),
            "max_model_len": count(),
        })),
        "ModelList": object(json!({"object": only("list"), "data": list(refer("Model"))})),
        "Health": object(json!({
            "status": condition(), "live": flag(), "ready": flag(), "reason": or_null(text()), "model": text(),
            "running": count(), "lanes": list(object(json!({
                "lane": count(), "doing": text(), "since_s": number(), "status": condition(),
                "reason": or_null(text()),
            }))),
        })),
        "Version": object(json!({"version": text()})),
        "Document": any_object(),
        "ServerInfo": object(json!({
            "model_id": text(), "served_model_name": list(text()), "version": text(), "device": text(),
            "tp_size": count(), "dp_size": count(), "lanes_per_group": count(), "nodes": count(),
            "step_rows": list(count()), "page_size": count(), "limits": object(json!({
                "max_model_len": count(), "cache_tokens_per_lane": count(), "max_num_seqs": count(),
                "max_waiting": count(), "lanes_served_here": count(), "vocab_size": count(),
            })),
        })),
        "ProfileBegun": object(json!({"profiling": {"const": true}})),
        "ProfileWritten": object(json!({
            "profiling": {"const": false}, "file": text(), "steps": count(), "steps_lost": count(),
        })),
        "EngineState": object(json!({"paused": flag(), "draining": flag(), "running": count()})),
        "CacheStats": object(json!({
            "token_cache": object(json!({
                "hits": count(), "misses": count(), "hit_bytes": count(), "miss_bytes": count(),
                "parts": count(), "bytes": count(),
            })),
            "kv_caches": list(object(json!({
                "lane": count(), "pages_held": count(), "pages_kept": count(), "prompt_tokens": count(),
                "prompt_tokens_found": count(), "preemptions": count(),
            }))),
        })),
        "StepsEvent": object(json!({
            "lanes": list(object(json!({"lane": count(), "doing": text(), "since_ms": count()}))),
            "fields?": list(text()),
            "limits?": object(json!({
                "max_num_seqs": count(), "cache_tokens": count(), "max_model_len": count(), "queue_max": count(),
            })),
            "steps": list(list(count())),
        })),
    })
}

/// What every answer of OpenAI's older APIs begins with.
fn envelope(object: &str) -> Value {
    json!({"id": text(), "object": only(object), "created": count(), "model": text()})
}

/// An object of these fields. All of them are there, but for those whose name ends with a question mark.
fn object(fields: Value) -> Value {
    let Value::Object(fields) = fields else { unreachable!("fields have names") };
    let (mut properties, mut required) = (Map::new(), Vec::new());
    for (name, schema) in fields {
        match name.strip_suffix('?') {
            Some(name) => drop(properties.insert(name.into(), schema)),
            None => {
                required.push(Value::from(name.as_str()));
                properties.insert(name, schema);
            }
        }
    }
    let mut schema = json!({"type": "object", "properties": properties});
    if !required.is_empty() {
        schema["required"] = required.into();
    }
    schema
}

fn with(mut fields: Value, more: &[(&str, Value)]) -> Value {
    for (name, schema) in more {
        fields[*name] = schema.clone();
    }
    fields
}

fn any_of<const N: usize>(schemas: [Value; N]) -> Value {
    json!({"anyOf": Value::from_iter(schemas)})
}

fn or_null(schema: Value) -> Value {
    crate::declare::or_null(schema)
}

fn list(items: Value) -> Value {
    json!({"type": "array", "items": items})
}

fn empty() -> Value {
    json!({"type": "array", "maxItems": 0})
}

fn any_object() -> Value {
    json!({"type": "object"})
}

fn text() -> Value {
    json!({"type": "string"})
}

fn only(word: &str) -> Value {
    json!({"const": word})
}

fn words(words: &[&str]) -> Value {
    json!({"type": "string", "enum": words})
}

fn number() -> Value {
    json!({"type": "number"})
}

fn count() -> Value {
    json!({"type": "integer", "minimum": 0})
}

fn byte() -> Value {
    json!({"type": "integer", "minimum": 0, "maximum": 255})
}

fn flag() -> Value {
    json!({"type": "boolean"})
}

fn finish() -> Value {
    words(&["stop", "length", "tool_calls"])
}

/// What ends a complete stream; the only event whose data is no JSON.
fn done() -> Value {
    only("[DONE]")
}
