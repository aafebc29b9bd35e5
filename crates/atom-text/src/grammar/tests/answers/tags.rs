//! Calls whose parameters are tags: what of their schemas holds, and what is refused.

use super::*;

/// Formats that write parameters as tags.
const TAGGED: [ToolFormat; 4] =
    [ToolFormat::Qwen3Coder, ToolFormat::Glm45, ToolFormat::MinimaxM2, ToolFormat::DeepseekV4];

/// A call of `f` in one of these, with texts or with JSON.
fn tagged(format: ToolFormat, parameters: &[(&str, &str)], are_texts: bool) -> String {
    let all = |write: &dyn Fn(&str, &str) -> String| -> String {
        parameters.iter().map(|(key, value)| write(key, value)).collect()
    };
    match format {
        ToolFormat::Qwen3Coder => {
            let inner = all(&|key, value| format!("<parameter={key}>\n{value}\n</parameter>\n"));
            format!("<tool_call>\n<function=f>\n{inner}</function>\n</tool_call>")
        }
        ToolFormat::Glm45 => {
            let inner =
                all(&|key, value| format!("<arg_key>{key}</arg_key>\n<arg_value>{value}</arg_value>\n"));
            format!("<tool_call>f\n{inner}</tool_call>")
        }
        ToolFormat::MinimaxM2 => {
            let inner = all(&|key, value| format!("<parameter name=\"{key}\">{value}</parameter>\n"));
            format!("<minimax:tool_call>\n<invoke name=\"f\">\n{inner}</invoke>\n</minimax:tool_call>")
        }
        _ => {
            let inner = all(&|key, value| {
                format!(
                    "<｜DSML｜parameter name=\"{key}\" string=\"{are_texts}\">{value}</｜DSML｜parameter>\n"
                )
            });
            format!(
                "<｜DSML｜tool_calls>\n<｜DSML｜invoke name=\"f\">\n{inner}</｜DSML｜invoke>\n</｜DSML｜tool_calls>"
            )
        }
    }
}

#[test]
fn tagged_strings_are_held_to_their_patterns_and_lengths() {
    let properties = json!({
        "code": {"type": "string", "pattern": "^[A-Z]{2}|-[0-9]+$"},
        "name": {"type": "string", "minLength": 2, "maxLength": 3},
        "path": {"type": "string", "pattern": "a/b"},
    });
    let parameters =
        json!({"type": "object", "properties": properties, "required": ["code", "name", "path"]});
    let tools = strict(parameters);
    for (format, tokenizer) in formats_and_tokenizers() {
        if !TAGGED.contains(&format) {
            continue;
        }
        let dialect = Dialect { reasoning: None, tools: Some(format) };
        let calls = Calls { format, tools: &tools, parallel: false };
        let grammar = answers(&tokenizer, dialect, AnswerStart::Content, Some(calls), Instead::Nothing);
        for (code, name, path, is_right) in [
            ("AB", "né", "xa/by", true),
            ("ABc\n", "<b>", "a/b</", true),
            ("x-12", "abc", "a/b\n", true),
            ("xAB", "ab", "a/b", false),
            ("-12x", "ab", "a/b", false),
            ("AB", "a", "a/b", false),
            ("AB", "abcd", "a/b", false),
            ("AB", "ab", "a-b", false),
        ] {
            let text = tagged(format, &[("code", code), ("name", name), ("path", path)], true);
            assert_eq!(takes(&tokenizer, &grammar, &text), is_right, "{}: {text:?}", format.name());
            let (_, calls) = read(dialect, AnswerStart::Content, &tools, &text);
            let said: Value = serde_json::from_str(&calls[0].1).unwrap();
            assert_eq!(said, json!({"code": code, "name": name, "path": path}), "{}", format.name());
        }
    }
}

/// What strict tools say of a string's `format` was left out where parameters are tags.
#[test]
fn tagged_strings_are_held_to_their_format() {
    let cases = [
        ("date", "2024-02-28", "2024-02-30"),
        ("time", "23:59:00.5Z", "23:59"),
        ("date-time", "2024-12-31T00:00:00+01:00", "2024-12-31"),
        ("uuid", "01234567-89ab-cdef-0123-456789abcdef", "01234567-89ab-cdef-0123-456789abcde"),
        ("email", "a.b@c-d.example", "a.b@"),
        ("ipv4", "10.0.255.1", "10.0.256.1"),
        ("uri", "https://a.example:80/b/c%20d?e=f#g", "a.example/b"),
    ];
    for (format, tokenizer) in formats_and_tokenizers() {
        for (name, fits, breaks) in cases.into_iter().filter(|_| TAGGED.contains(&format)) {
            let tools =
                strict(json!({"properties": {"p": {"type": "string", "format": name}}, "required": ["p"]}));
            let calls = Calls { format, tools: &tools, parallel: false };
            let dialect = Dialect { reasoning: None, tools: Some(format) };
            let grammar = answers(&tokenizer, dialect, AnswerStart::Content, Some(calls), Instead::Nothing);
            for (text, is_right) in [(fits, true), (breaks, false)] {
                let call = tagged(format, &[("p", text)], true);
                assert_eq!(takes(&tokenizer, &grammar, &call), is_right, "{name} {text:?}");
            }
        }
    }
}

/// A closing tag in a string of JSON ended the value there, which the grammar lets a model write.
#[test]
fn json_in_tags_may_hold_the_closing_tag_in_a_string() {
    let properties = json!({
        "o": {"type": "object"}, "a": {"type": "array"}, "u": {"type": ["string", "null"]},
    });
    let tools = strict(json!({"properties": properties, "required": ["o", "a", "u"]}));
    for (format, tokenizer) in formats_and_tokenizers() {
        let dialect = Dialect { reasoning: None, tools: Some(format) };
        let calls = Calls { format, tools: &tools, parallel: false };
        let grammar = answers(&tokenizer, dialect, AnswerStart::Content, Some(calls), Instead::Nothing);
        if !TAGGED.contains(&format) {
            continue;
        }
        for end in ["</parameter>", "</arg_value>", "</｜DSML｜parameter>", "</function>", "<parameter=o>"]
        {
            let values = json!({"o": {end: [end, "\"", end]}, "a": [[end], {"k": "\\"}], "u": end});
            let [o, a, u] = ["o", "a", "u"].map(|key| values[key].to_string());
            let text = tagged(format, &[("o", &o), ("a", &a), ("u", &u)], false);
            // As a special token it is no part of a string; spelled it is.
            let holds_token = ["｜DSML｜", end]
                .iter()
                .any(|marker| end.contains(marker) && tokenizer.id_of(marker).is_some());
            if !holds_token {
                assert!(takes(&tokenizer, &grammar, &text), "{text:?}");
            }
            let (content, calls) = read(dialect, AnswerStart::Content, &tools, &text);
            assert_eq!(content, "", "{text:?}");
            assert_eq!(serde_json::from_str::<Value>(&calls[0].1).unwrap(), values, "{text:?}");
        }
    }
}

#[test]
fn what_tags_can_not_hold_of_a_strict_tool_is_refused() {
    let p = |schema: Value| json!({"properties": {"p": schema}});
    let cases = [
        (p(json!({"type": "string", "format": "regex"})), Some("format \"regex\"")),
        (p(json!({"type": "string", "anyOf": [{"pattern": "a"}, {"const": "b"}]})), Some("'anyOf'")),
        (p(json!({"type": "string", "not": {"const": "a"}})), Some("'not'")),
        (p(json!({"enum": ["a", "bc"], "minLength": 2})), Some("'minLength' beside 'enum'")),
        (json!({"properties": {"a>b": {}}}), Some("\"a>b\"")),
        (json!({"properties": {"p": {}}, "required": ["q"]}), Some("\"q\" is required")),
        (json!({"properties": {"p": {}}, "minProperties": 1}), Some("'minProperties'")),
        (json!({"$ref": "#/$defs/x", "$defs": {"x": {"type": "object"}}}), Some("'$ref'")),
        (p(json!({"enum": ["", "a"]})), None),
        (p(json!({"type": "array", "items": {"anyOf": [{"type": "string"}, {"type": "null"}]}})), None),
    ];
    let tokenizer = byte_tokenizer();
    for format in TAGGED {
        let end = if format == ToolFormat::Glm45 { "</arg_value>" } else { "</parameter>" };
        let end = if format == ToolFormat::DeepseekV4 { "</｜DSML｜parameter>" } else { end };
        let ends = (p(json!({"enum": ["a", format!("b{end}")]})), Some("which ends a parameter"));
        for (parameters, words) in cases.iter().cloned().chain([ends]) {
            let tools = strict(parameters);
            let calls = Calls { format, tools: &tools, parallel: false };
            let dialect = Dialect { reasoning: None, tools: Some(format) };
            let lark =
                dialect.answer_grammar(&tokenizer, AnswerStart::Content, Some(calls), Instead::Nothing);
            match words {
                Some(words) => {
                    let error = lark.unwrap_err().to_string();
                    assert!(error.contains(words) && error.contains("\"f\""), "{error}");
                }
                None => {
                    let source = GrammarSource::Lark(lark.unwrap().unwrap());
                    vocabulary(&tokenizer).compile(&source).unwrap();
                }
            }
        }
    }
}

fn strict(parameters: Value) -> Arc<[Tool]> {
    [Tool { name: "f".into(), description: None, parameters, strict: true }].into()
}

/// The parser ends a value at each of these: a model leaves out one or the other.
#[test]
fn a_value_of_qwen3_coder_holds_nothing_that_would_end_it() {
    let (tokenizer, tools) = (byte_tokenizer(), text_tool());
    let dialect = Dialect { reasoning: None, tools: Some(ToolFormat::Qwen3Coder) };
    let calls = Calls { format: ToolFormat::Qwen3Coder, tools: &tools, parallel: false };
    let grammar = answers(&tokenizer, dialect, AnswerStart::Content, Some(calls), Instead::Nothing);
    for (value, is_taken) in [
        ("", true),
        ("<parameter=b> </function> \n\n", true),
        ("a</parameter>b", false),
        ("</parameter>", false),
        ("a\n<parameter=b>\nc", false),
        ("a\n</function>", false),
        ("a\n</parameter>\nb", false),
    ] {
        let text = format!(
            "<tool_call>\n<function=f>\n<parameter=text>\n{value}\n</parameter>\n</function>\n</tool_call>"
        );
        assert_eq!(takes(&tokenizer, &grammar, &text), is_taken, "{value:?}");
        if is_taken {
            let (_, calls) = read(dialect, AnswerStart::Content, &tools, &text);
            assert_eq!(serde_json::from_str::<Value>(&calls[0].1).unwrap(), json!({"text": value}));
        }
    }
}
