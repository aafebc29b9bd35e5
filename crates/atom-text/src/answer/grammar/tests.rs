use super::*;
use crate::answer::ReasoningFormat;
use crate::testing::byte_tokenizer;
use std::collections::BTreeSet;

fn tool(name: &str, parameters: Value) -> Tool {
    Tool { name: name.into(), description: None, parameters, strict: true }
}

fn weather() -> Tool {
    let properties = json!({
        "city": {"type": "string"},
        "unit": {"type": "string", "enum": ["C", "F"]},
        "days": {"type": "integer"},
    });
    tool("get_weather", json!({"type": "object", "properties": properties, "required": ["city"]}))
}

/// Markers that look like special tokens are written as such.
fn by_shape(marker: &str) -> Option<String> {
    let is_special = (marker.starts_with("<|") && marker.ends_with("|>"))
        || (marker.starts_with("<｜") && marker.ends_with("｜>"));
    is_special.then(|| marker.to_owned())
}

fn grammar(reasoning: Option<ReasoningFormat>, format: ToolFormat, tools: &[Tool], parallel: bool) -> String {
    grammar_of(reasoning, format, tools, parallel, Instead::Nothing)
}

fn grammar_of(
    reasoning: Option<ReasoningFormat>,
    format: ToolFormat,
    tools: &[Tool],
    parallel: bool,
    instead: Instead<'_>,
) -> String {
    let calls = Calls { format, tools, parallel };
    let dialect = Dialect { reasoning, tools: Some(format) };
    dialect.grammar(AnswerStart::Content, Some(calls), instead, &by_shape).unwrap().unwrap()
}

/// A schema as it is compiled.
fn json(schema: &str) -> String {
    let bound = ",\"x-guidance\":{\"whitespace_pattern\":\"[ \\\\n\\\\r\\\\t]{1,82}\"}}";
    format!("%json {}{bound}", schema.strip_suffix('}').unwrap())
}

/// Names of rules that a text uses: lower-case words outside of quotes, schemas, patterns and brackets.
fn used(grammar: &str) -> BTreeSet<String> {
    let mut names = BTreeSet::new();
    for line in grammar.lines() {
        let body = line.split_once(": ").map_or("", |(_, body)| body);
        let body = body.split("%json").next().unwrap_or("");
        let mut outside = String::new();
        let mut chars = body.chars();
        while let Some(c) = chars.next() {
            let closing = match c {
                '"' | '/' => c,
                '<' => '>',
                _ => {
                    outside.push(c);
                    continue;
                }
            };
            while let Some(inner) = chars.next() {
                match inner {
                    '\\' => drop(chars.next()),
                    _ if inner == closing => break,
                    _ => {}
                }
            }
            outside.push(' ');
        }
        let words = outside.split(|c: char| !c.is_alphanumeric() && c != '_');
        names.extend(words.filter(|word| word.starts_with(char::is_alphabetic)).map(str::to_owned));
    }
    names
}

fn defined(grammar: &str) -> Vec<String> {
    grammar.lines().filter_map(|line| Some(line.split([':', '[']).next()?.to_owned())).collect()
}

#[test]
fn every_rule_is_defined_once_and_used() {
    let tools =
        [weather(), tool("free", json!({})), tool("none", json!({"type": "object", "properties": {}}))];
    for format in ToolFormat::ALL {
        for reasoning in ReasoningFormat::ALL.into_iter().map(Some).chain([None]) {
            let json = GrammarSource::JsonObject;
            let insteads = [Instead::Nothing, Instead::Text, Instead::Format(&json)];
            for (parallel, instead) in [false, true].into_iter().flat_map(|p| insteads.map(|i| (p, i))) {
                let text = grammar_of(reasoning, format, &tools, parallel, instead);
                let names = defined(&text);
                let set: BTreeSet<String> = names.iter().cloned().collect();
                assert_eq!(names.len(), set.len(), "defined twice in {text}");
                let mut used = used(&text);
                used.insert("start".into());
                assert_eq!(used, set, "{text}");
                for tool in &tools {
                    assert!(text.contains(&tool.name), "{text}");
                }
            }
        }
    }
}

#[test]
fn the_grammar_of_a_format_is_its_calls() {
    let tools = [tool("f", json!({}))];
    let object = json("{\"type\":\"object\"}");
    let named = json(
        "{\"type\":\"object\",\"properties\":{\"name\":{\"const\":\"f\"},\"arguments\":{\"type\":\"object\"}},\"required\":\
         [\"name\",\"arguments\"],\"additionalProperties\":false}",
    );
    let cases = [
        (
            ToolFormat::Hermes,
            true,
            format!(
                "start: \"<tool_call>\" call (\"\\n\" \"<tool_call>\" call)*\n\
                 object_0: {named}\n\
                 call_0: \"\\n\" object_0 \"\\n\" \"</tool_call>\"\n\
                 call: call_0\n"
            ),
        ),
        (
            ToolFormat::KimiK2,
            false,
            format!(
                "start: <|tool_calls_section_begin|> call <|tool_calls_section_end|>\n\
                 arguments_0: {object}\n\
                 call_0: <|tool_call_begin|> \"functions.f:\" /[0-9]{{1,4}}/ <|tool_call_argument_begin|> arguments_0 <|tool_call_end|>\n\
                 call: call_0\n"
            ),
        ),
        (
            ToolFormat::Mistral,
            true,
            format!(
                "start: \"[TOOL_CALLS]\" call (\"[TOOL_CALLS]\" call)*\n\
                 arguments_0: {object}\n\
                 call_0: \"f\" \"[ARGS]\" arguments_0\n\
                 call: call_0\n"
            ),
        ),
    ];
    for (format, parallel, expected) in cases {
        assert_eq!(grammar(None, format, &tools, parallel), expected);
    }
    let text = grammar(None, ToolFormat::Qwen3Coder, &[weather()], false);
    let integer = json("{\"type\":\"integer\"}");
    let close = "\\x0a\\x3c\\x2fparameter\\x3e";
    let value = format!(
        "/(?s:.*){close}/ & ~/((?s:.*)[^\\n])?<\\/parameter>(?s:.*)|(?s:.*)\\n(<parameter=|<\\/function>)(?s:.*)/"
    );
    let expected = format!(
        "start: \"<tool_call>\" call\n\
        VALUE_0_0: {value}\n\
        value_0_0[lazy]: VALUE_0_0\n\
        parameter_0_0: \"<parameter=city>\\n\" value_0_0 \"\\n\"\n\
        parameter_0_1: \"<parameter=unit>\\n\" (\"C\" | \"F\") \"\\n</parameter>\" \"\\n\"\n\
        value_0_2: {integer}\n\
        parameter_0_2: \"<parameter=days>\\n\" value_0_2 \"\\n</parameter>\" \"\\n\"\n\
        call_0: \"\\n<function=get_weather>\\n\" parameter_0_0 parameter_0_1? parameter_0_2? \"</function>\\n\" \"</tool_call>\"\n\
        call: call_0\n"
    );
    assert_eq!(text, expected);
}

#[test]
fn a_schema_that_nothing_satisfies_is_named_by_its_tool() {
    let endless = json!({"type": "object", "properties": {"p": {"$ref": "#/$defs/p"}}, "required": ["p"],
        "$defs": {"p": {"type": "object", "properties": {"p": {"$ref": "#/$defs/p"}}, "required": ["p"]}}});
    let whole = json!({"type": "object", "properties": {"p": {"$ref": "#"}}, "required": ["p"]});
    for (parameters, words) in [
        (endless, "no finite document"),
        (json!({"x-guidance": {}, "type": "object"}), "x-guidance"),
        (whole, "no finite document"),
    ] {
        let tools = [tool("good", json!({})), tool("odd", parameters)];
        let calls = Calls { format: ToolFormat::Hermes, tools: &tools, parallel: false };
        let refused = Dialect::default().grammar(AnswerStart::Content, Some(calls), Instead::Text, &by_shape);
        let error = refused.unwrap_err().to_string();
        assert!(error.contains("\"odd\"") && error.contains(words), "{error}");
    }
}

#[test]
fn reasoning_may_come_first_and_must_end_where_the_prompt_opened_it() {
    let dialect = Dialect { reasoning: Some(ReasoningFormat::Think), tools: Some(ToolFormat::Hermes) };
    let tools = [tool("f", json!({}))];
    let text = grammar(dialect.reasoning, ToolFormat::Hermes, &tools, false);
    assert!(text.starts_with("start: thought? \"<tool_call>\" call\n"), "{text}");
    assert!(text.contains("thinking[lazy]: THINKING\n"), "{text}");
    assert!(text.contains("thought: OPEN thinking /\\n{1,2}/?\n"), "{text}");
    let tokenizer = byte_tokenizer();
    let calls = Calls { format: ToolFormat::Hermes, tools: &tools, parallel: false };
    let text =
        dialect.answer_grammar(&tokenizer, AnswerStart::Reasoning, Some(calls), Instead::Nothing).unwrap();
    let text = text.unwrap();
    assert!(text.starts_with("start: thought \"<tool_call>\" call\n"), "{text}");
    assert!(text.contains("thought: thinking /\\n{1,2}/?\n"), "{text}");
}

#[test]
fn special_tokens_of_a_tokenizer_are_written_by_number() {
    let tokenizer = byte_tokenizer();
    let lark = Lark {
        special: &|marker| {
            let id = tokenizer.id_of(marker).filter(|&id| tokenizer.is_special(id))?;
            Some(format!("<[{id}]>"))
        },
        rules: Vec::new(),
    };
    let id = tokenizer.id_of("<|end|>").unwrap();
    assert_eq!(
        lark.markers(&["<|end|>", "<|no token|>", "the"]),
        format!("<[{id}]> \"<|no token|>\" \"the\"")
    );
}

#[test]
fn definitions_move_to_the_root_of_the_schema() {
    let parameters = json!({
        "type": "object",
        "properties": {"p": {"$ref": "#/$defs/point"}},
        "$defs": {"point": {"type": "array"}},
    });
    let tools = [tool("f", parameters)];
    let text = grammar(None, ToolFormat::Hermes, &tools, false);
    assert!(
        text.contains(
            "\"additionalProperties\":false,\"$defs\":{\"point\":{\"type\":\"array\"}},\"x-guidance\""
        ),
        "{text}"
    );
    let text = grammar(None, ToolFormat::Glm45, &tools, false);
    assert!(
        text.contains(
            "%json {\"$ref\":\"#/$defs/point\",\"$defs\":{\"point\":{\"type\":\"array\"}},\"x-guidance\""
        ),
        "{text}"
    );
}
