//! Answers within the grammars of tools and formats, read by the parser that will read them.

use super::*;
use crate::{
    AnswerEnd, AnswerParser, AnswerPart, AnswerStart, Calls, Dialect, Instead, ReasoningFormat,
    TokenizerSource, Tool, ToolFormat,
};
use std::sync::Arc;

mod tags;

fn weather_schema() -> Value {
    json!({
        "type": "object",
        "properties": {
            "unit": {"enum": ["C", "F"]},
            "days": {"type": "integer", "minimum": 1, "maximum": 9},
            // Strings among other types are JSON to the grammar, so they have to be to the parser.
            "city": {"anyOf": [{"enum": ["Ulm", "Bonn"]}, {"type": "null"}]},
            "mode": {"const": "fast"},
        },
        "required": ["unit", "days", "city", "mode"],
        "additionalProperties": false,
    })
}

fn weather_tools() -> Arc<[Tool]> {
    let tool = |name: &str| {
        let parameters = weather_schema();
        Tool { name: name.into(), description: None, parameters, strict: true }
    };
    [tool("weather"), tool("tide")].into()
}

/// Every format with its markers as text, and as special tokens.
fn formats_and_tokenizers() -> Vec<(ToolFormat, Tokenizer)> {
    let mut all = Vec::new();
    for format in ToolFormat::ALL {
        let dialect = Dialect { reasoning: None, tools: Some(format) };
        for markers in [Vec::new(), dialect.markers()] {
            let mut tokens = byte_vocabulary();
            // Harmony has a marker of this name, which ends a message and no answer.
            let end = tokens.eos.unwrap() as usize;
            tokens.tokens[end] = "<|eos|>".into();
            tokens.token_types.extend(markers.iter().map(|_| 3));
            tokens.tokens.extend(markers.into_iter().map(String::from));
            all.push((format, Tokenizer::load(&TokenizerSource::Gguf(tokens)).unwrap()));
        }
    }
    all
}

fn answers(
    tokenizer: &Tokenizer,
    dialect: Dialect,
    start: AnswerStart,
    calls: Option<Calls<'_>>,
    instead: Instead<'_>,
) -> Grammar {
    let lark = dialect.answer_grammar(tokenizer, start, calls, instead).unwrap().unwrap();
    let grammar = vocabulary(tokenizer).compile(&GrammarSource::Lark(lark.clone()));
    grammar.unwrap_or_else(|error| panic!("{dialect:?}: {error}: {lark}"))
}

/// Content, names and arguments of an answer.
fn read(
    dialect: Dialect,
    start: AnswerStart,
    tools: &Arc<[Tool]>,
    text: &str,
) -> (String, Vec<(String, String)>) {
    let mut parser = AnswerParser::new(dialect, start, tools.clone());
    let (mut parts, mut content, mut calls) = (Vec::new(), String::new(), Vec::new());
    parser.push(text, &mut parts);
    parser.finish(AnswerEnd::Whole, &mut parts);
    for part in parts {
        match part {
            AnswerPart::Call { name, .. } => calls.push((name, String::new())),
            AnswerPart::Arguments { json, .. } => calls.last_mut().unwrap().1.push_str(&json),
            AnswerPart::Content(said) => content.push_str(&said),
            AnswerPart::Reasoning(_) => {}
        }
    }
    (content, calls)
}

/// True if the masks allow exactly this text as a whole answer.
fn takes(tokenizer: &Tokenizer, grammar: &Grammar, text: &str) -> bool {
    let mut constraint = grammar.start();
    tokenizer.encode(text, false).unwrap().into_iter().all(|token| {
        allowed(&mut constraint, tokenizer.vocab_size()).contains(&token) && constraint.advance(token).is_ok()
    }) && constraint.is_complete().unwrap()
}

/// What `tool_choice: "required"` promises, for every format and for markers that are tokens or text.
#[test]
fn an_answer_within_the_masks_of_a_call_grammar_calls_an_offered_tool_with_arguments_of_its_schema() {
    let (schema, tools) = (weather_schema(), weather_tools());
    // Whether a tool is strict changes nothing where it has to be called.
    let loose: Arc<[Tool]> = tools.iter().cloned().map(|tool| Tool { strict: false, ..tool }).collect();
    for (format, tokenizer) in formats_and_tokenizers() {
        let dialect = Dialect { reasoning: None, tools: Some(format) };
        let calls = Calls { format, tools: &tools, parallel: false };
        let of_loose = Calls { tools: &loose, ..calls };
        let [lark, same] = [calls, of_loose].map(|calls| {
            dialect.answer_grammar(&tokenizer, AnswerStart::Content, Some(calls), Instead::Nothing).unwrap()
        });
        assert_eq!(lark, same, "{}", format.name());
        let grammar = answers(&tokenizer, dialect, AnswerStart::Content, Some(calls), Instead::Nothing);
        let (mut draws, mut ended) = (Draws::new(11), 0);
        for _ in 0..6 {
            let Some(text) = walk(&tokenizer, &grammar, &mut draws) else { continue };
            ended += 1;
            let case = format!("{}: {text:?}", format.name());
            let (content, calls) = read(dialect, AnswerStart::Content, &tools, &text);
            assert!(content.trim().is_empty(), "{content:?}: {case}");
            let [(name, arguments)] = &calls[..] else { panic!("{calls:?}: {case}") };
            assert!(name == "weather" || name == "tide", "{name}: {case}");
            let arguments: Value =
                serde_json::from_str(arguments).unwrap_or_else(|error| panic!("{error}: {case}"));
            assert!(validates(&schema, &schema, &arguments), "{arguments}: {case}");
        }
        assert!(ended > 0, "{}: no walk came to its end", format.name());
    }
}

/// What `strict` promises where the model chooses, and a format of the answer beside tools.
#[test]
fn an_answer_that_may_call_is_any_text_or_its_format_and_its_calls_follow_their_schemas() {
    let tools = weather_tools();
    for (format, tokenizer) in formats_and_tokenizers() {
        let dialect = Dialect { reasoning: None, tools: Some(format) };
        let calls = Calls { format, tools: &tools, parallel: true };
        let of = |instead| answers(&tokenizer, dialect, AnswerStart::Content, Some(calls), instead);
        let (must, may, json) = (
            of(Instead::Nothing),
            of(Instead::Text),
            of(Instead::Format(&GrammarSource::JsonSchema(json!({"type": "object", "required": ["b"]})))),
        );
        let mut draws = Draws::new(3);
        let text = (0..20).find_map(|_| walk(&tokenizer, &must, &mut draws)).unwrap();
        let case = format!("{}: {text:?}", format.name());
        let wrong: Vec<String> =
            [("weather", "wether"), ("tide", "tides"), ("fast", "slow"), ("mode", "made")]
                .iter()
                .filter(|(right, _)| text.contains(right))
                .map(|(right, wrong)| text.replace(right, wrong))
                .collect();
        assert!(wrong.len() >= 3, "{case}");
        for grammar in [&must, &may, &json] {
            assert!(takes(&tokenizer, grammar, &text), "{case}");
            for wrong in &wrong {
                assert!(!takes(&tokenizer, grammar, wrong), "{case}: {wrong:?}");
            }
        }
        let is_harmony = format == ToolFormat::Harmony;
        let said = |text: &str| match is_harmony {
            true => format!("<|channel|>final<|message|>{text}"),
            false => text.to_owned(),
        };
        for words in ["", "It is 3 < 4.\n\nIsn't [it]?"] {
            assert!(takes(&tokenizer, &may, &said(words)), "{case}: {words:?}");
            assert!(!takes(&tokenizer, &must, &said(words)), "{case}: {words:?}");
            assert!(!takes(&tokenizer, &json, &said(words)), "{case}: {words:?}");
        }
        // Within a string, a marker is one only if it is a token.
        let quoted = ["<tool_call>", "<b>"].into_iter().find(|text| tokenizer.id_of(text).is_none());
        let object = said(&format!("{{\"b\":[{:?}]}}", quoted.unwrap()));
        assert!(takes(&tokenizer, &json, &object) && !takes(&tokenizer, &must, &object), "{case}");
        assert!(!takes(&tokenizer, &json, &said("{\"a\":1}")), "{case}");
        // A bare object and a message are calls only at the beginning.
        if !is_harmony && format != ToolFormat::Llama3Json {
            let before = format!("Let me look. {text}");
            assert!(takes(&tokenizer, &may, &before) && !takes(&tokenizer, &must, &before), "{case}");
            let (content, calls) = read(dialect, AnswerStart::Content, &tools, &before);
            assert_eq!((content.trim(), calls.is_empty()), ("Let me look.", false), "{case}");
            for wrong in &wrong {
                assert!(!takes(&tokenizer, &may, &format!("Let me look. {wrong}")), "{case}: {wrong:?}");
            }
        }
    }
}

/// The chat template of GLM-4.6 leaves the line break in front of the tag to the model; other models write none.
#[test]
fn thoughts_before_text_and_calls_may_begin_with_a_line_break() {
    let (tokenizer, tools) = (byte_tokenizer(), weather_tools());
    let dialect = Dialect { reasoning: Some(ReasoningFormat::Think), tools: Some(ToolFormat::Hermes) };
    let calls = Calls { format: ToolFormat::Hermes, tools: &tools, parallel: true };
    let may = answers(&tokenizer, dialect, AnswerStart::Content, Some(calls), Instead::Text);
    for before in ["", "\n"] {
        for behind in ["", "\n", "\n\n"] {
            for rest in ["Hello.", "<tool_call>"] {
                let text = format!("{before}<think>hm <tool_call></think>{behind}{rest}");
                assert_eq!(takes(&tokenizer, &may, &text), rest == "Hello.", "{text:?}");
            }
        }
    }
}

/// Markers of thoughts and calls are no texts of a format: they would be read as what they are.
#[test]
fn a_pattern_beside_tools_matches_no_call_and_no_thought() {
    let (tokenizer, tools) = (byte_tokenizer(), weather_tools());
    let dialect = Dialect { reasoning: Some(ReasoningFormat::Think), tools: Some(ToolFormat::Hermes) };
    let calls = Calls { format: ToolFormat::Hermes, tools: &tools, parallel: false };
    let any = GrammarSource::Regex("(?s:.+)".into());
    let grammar = answers(&tokenizer, dialect, AnswerStart::Content, Some(calls), Instead::Format(&any));
    for (text, is_taken) in [
        ("Hello <tool_call> <think>.", true),
        ("<tool_call>\n{\"name\": \"made_up\", \"arguments\": {}}\n</tool_call>", false),
        ("<think>a</think>b", false),
    ] {
        assert_eq!(takes(&tokenizer, &grammar, text), is_taken, "{text:?}");
    }
}

/// A format behind thoughts: as the prompt opened them, or as the model may.
#[test]
fn a_format_holds_behind_thoughts() {
    let tokenizer = byte_tokenizer();
    let choice = GrammarSource::Choice(vec!["yes".into(), "no/never".into()]);
    let regex = GrammarSource::Regex("^[a-z/]+\\/[\n]x$".into());
    let dialect = Dialect { reasoning: Some(ReasoningFormat::Think), tools: None };
    let of = |start, source| answers(&tokenizer, dialect, start, None, Instead::Format(source));
    let inside = AnswerStart::Reasoning;
    for (source, right, wrong) in [
        (&GrammarSource::JsonObject, "{\"a\":1}", "[]"),
        (&choice, "no/never", "maybe"),
        (&regex, "a/b/\nx", "a/b\n"),
    ] {
        let grammar = of(inside, source);
        for (text, is_right) in [
            (format!("{{\"hm\"}} yes?</think>\n\n{right}"), true),
            (format!("hm</think>{right}"), true),
            (format!("hm</think>{wrong}"), false),
            (right.to_owned(), false),
        ] {
            assert_eq!(takes(&tokenizer, &grammar, &text), is_right, "{source:?}: {text:?}");
        }
        let grammar = of(AnswerStart::Content, source);
        assert!(takes(&tokenizer, &grammar, right), "{source:?}");
        assert!(!takes(&tokenizer, &grammar, wrong), "{source:?}");
    }
    let json = of(AnswerStart::Content, &GrammarSource::JsonObject);
    assert!(takes(&tokenizer, &json, "<think>hm</think>\n\n{}"));
    let lark = GrammarSource::Lark("start: \"a\"".into());
    let within = dialect.answer_grammar(&tokenizer, inside, None, Instead::Format(&lark));
    assert_eq!(within.unwrap(), None, "a grammar with rules of its own");
}

/// Strings that stand without quotes have the length and the pattern of their schema.
/// A tool with one parameter, a text.
fn text_tool() -> Arc<[Tool]> {
    let parameters =
        json!({"type": "object", "properties": {"text": {"type": "string"}}, "required": ["text"]});
    [Tool { name: "f".into(), description: None, parameters, strict: true }].into()
}

/// Tokens of a text in which markers are spelled out, though the tokenizer has them.
fn spelled(text: &str) -> Vec<TokenId> {
    text.bytes().map(TokenId::from).collect()
}

/// What looks like a marker is read as one, whatever tokens it came in, so that no mask may let it come unheld.
#[test]
fn markers_spelled_with_ordinary_tokens_are_no_text_beside_strict_tools() {
    let tools = weather_tools();
    for (format, tokenizer) in formats_and_tokenizers() {
        let dialect = Dialect { reasoning: None, tools: Some(format) };
        let opening = match format {
            ToolFormat::Harmony => "<|end|><|start|>assistant<|channel|>",
            ToolFormat::Llama3Json => "<|python_tag|>",
            ToolFormat::Hermes | ToolFormat::Qwen3Coder | ToolFormat::Glm45 => "<tool_call>",
            ToolFormat::Mistral => "[TOOL_CALLS]",
            ToolFormat::DeepseekV3 | ToolFormat::DeepseekV31 => "<｜tool▁calls▁begin｜>",
            ToolFormat::DeepseekV4 => "<｜DSML｜tool_calls>",
            ToolFormat::KimiK2 => "<|tool_calls_section_begin|>",
            ToolFormat::MinimaxM2 => "<minimax:tool_call>",
        };
        let calls = Calls { format, tools: &tools, parallel: false };
        let grammar = answers(&tokenizer, dialect, AnswerStart::Content, Some(calls), Instead::Text);
        let mut constraint = grammar.start();
        let mut tokens = match format {
            ToolFormat::Harmony => tokenizer.encode("<|channel|>final<|message|>So", false).unwrap(),
            _ => spelled("So"),
        };
        tokens.extend(spelled(opening));
        let is_spelled = tokens.into_iter().all(|token| {
            allowed(&mut constraint, tokenizer.vocab_size()).contains(&token)
                && constraint.advance(token).is_ok()
        });
        // Where the opening is no token, spelling is how it is written, and a call follows.
        let may = !is_spelled
            || (!matches!(format, ToolFormat::Harmony | ToolFormat::Llama3Json)
                && tokenizer.id_of(opening).is_none());
        assert!(may, "{}: {opening}", format.name());
    }
}

/// Kimi calls in the middle of its thoughts, which end so; the parser has always read it like that.
#[test]
fn calls_of_kimi_within_open_thoughts_are_held_to_their_schemas() {
    let tools = text_tool();
    let call = |arguments: &str| {
        format!(
            "<|tool_calls_section_begin|><|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>{arguments}\
             <|tool_call_end|><|tool_calls_section_end|>"
        )
    };
    for (format, tokenizer) in formats_and_tokenizers() {
        if format != ToolFormat::KimiK2 {
            continue;
        }
        let dialect = Dialect { reasoning: Some(ReasoningFormat::KimiK2), tools: Some(format) };
        let calls = Calls { format, tools: &tools, parallel: false };
        for instead in [Instead::Nothing, Instead::Text] {
            for (start, open) in [(AnswerStart::Reasoning, ""), (AnswerStart::Content, "<think>")] {
                let grammar = answers(&tokenizer, dialect, start, Some(calls), instead);
                let (right, wrong) = (call("{\"text\":\"a\"}"), call("{\"text\":1}"));
                for (text, is_taken) in [
                    (format!("{open}hm {right}"), true),
                    (format!("{open}hm</think>{right}"), true),
                    (format!("{open}hm {wrong}"), false),
                    (format!("{open}hm</think>{wrong}"), false),
                    (format!("{open}hm {right}</think>{right}"), false),
                ] {
                    assert_eq!(takes(&tokenizer, &grammar, &text), is_taken, "{instead:?} {text:?}");
                    if is_taken {
                        let (content, calls) = read(dialect, start, &tools, &text);
                        assert_eq!((content.as_str(), calls.len()), ("", 1), "{text:?}");
                    }
                }
            }
        }
    }
}

/// GPT-OSS tells the user what it is about to do before it calls.
#[test]
fn preambles_of_harmony_may_come_before_strict_calls() {
    let tools = text_tool();
    let format = ToolFormat::Harmony;
    let dialect = Dialect { reasoning: Some(ReasoningFormat::Harmony), tools: Some(format) };
    for (_, tokenizer) in formats_and_tokenizers().into_iter().filter(|(found, _)| *found == format) {
        let calls = Calls { format, tools: &tools, parallel: false };
        let grammar = answers(&tokenizer, dialect, AnswerStart::Content, Some(calls), Instead::Text);
        let thought = "<|channel|>analysis<|message|>hm<|end|><|start|>assistant";
        let preamble = "<|channel|>commentary<|message|>Let me look.<|end|><|start|>assistant";
        let call = |arguments: &str| {
            format!("<|channel|>commentary to=functions.f <|constrain|>json<|message|>{arguments}")
        };
        let (right, wrong) = (call("{\"text\":\"a\"}"), call("{\"text\":1}"));
        for before in [
            "".to_owned(),
            preamble.to_owned(),
            format!("{thought}{preamble}"),
            format!("{thought}{preamble}{preamble}"),
        ] {
            assert!(takes(&tokenizer, &grammar, &format!("{before}{right}")), "{before:?}");
            assert!(!takes(&tokenizer, &grammar, &format!("{before}{wrong}")), "{before:?}");
            assert!(
                takes(&tokenizer, &grammar, &format!("{before}<|channel|>final<|message|>So.")),
                "{before:?}"
            );
            let (content, calls) = read(dialect, AnswerStart::Content, &tools, &format!("{before}{right}"));
            assert_eq!(calls, [("f".to_owned(), "{\"text\":\"a\"}".to_owned())], "{before:?}");
            assert_eq!(content.is_empty(), !before.contains("look"), "{content:?}");
        }
    }
}

/// A pointer may lead anywhere within the schema of a tool, wherever that stands in the grammar.
#[test]
fn references_within_arguments_lead_anywhere_in_their_schema() {
    let parameters = json!({
        "type": "object",
        "properties": {
            "from": {"type": "array", "items": {"type": "integer"}, "maxItems": 1},
            "to": {"$ref": "#/properties/from"},
            "next": {"anyOf": [{"type": "null"}, {"$ref": "#"}]},
            // A value, and no reference.
            "kind": {"enum": [{"$ref": "#/properties/from"}, 1]},
            "unit": {"$ref": "#/$defs/unit"},
        },
        "required": ["from", "to", "next", "kind", "unit"],
        "additionalProperties": false,
        "$defs": {"unit": {"enum": ["C", 5]}},
    });
    let tools: Arc<[Tool]> =
        [Tool { name: "f".into(), description: None, parameters: parameters.clone(), strict: true }].into();
    for (format, tokenizer) in formats_and_tokenizers() {
        let dialect = Dialect { reasoning: None, tools: Some(format) };
        let calls = Calls { format, tools: &tools, parallel: false };
        let grammar = answers(&tokenizer, dialect, AnswerStart::Content, Some(calls), Instead::Nothing);
        let (mut draws, mut ended) = (Draws::new(5), 0);
        for _ in 0..6 {
            let Some(text) = walk(&tokenizer, &grammar, &mut draws) else { continue };
            ended += 1;
            let (_, calls) = read(dialect, AnswerStart::Content, &tools, &text);
            let arguments: Value = serde_json::from_str(&calls[0].1).unwrap();
            assert!(validates(&parameters, &parameters, &arguments), "{}: {arguments}", format.name());
        }
        assert!(ended > 0, "{}: no walk came to its end", format.name());
    }
}
