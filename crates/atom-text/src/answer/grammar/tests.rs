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

fn grammar(reasoning: Option<ReasoningFormat>, format: ToolFormat, tools: &[Tool], parallel: bool) -> String {
    Dialect { reasoning, tools: Some(format) }.call_grammar(format, tools, parallel)
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
            for parallel in [false, true] {
                let text = grammar(reasoning, format, &tools, parallel);
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
    let cases = [
        (
            ToolFormat::Hermes,
            true,
            "start: call (\"\\n\" call)*\n\
             object_0: %json {\"type\":\"object\",\"properties\":{\"name\":{\"const\":\"f\"},\"arguments\":{\"type\":\"object\"}},\"required\":[\"name\",\"arguments\"],\"additionalProperties\":false}\n\
             call_0: \"<tool_call>\" \"\\n\" object_0 \"\\n\" \"</tool_call>\"\n\
             call: call_0\n",
        ),
        (
            ToolFormat::KimiK2,
            false,
            "start: <|tool_calls_section_begin|> call <|tool_calls_section_end|>\n\
             arguments_0: %json {\"type\":\"object\"}\n\
             call_0: <|tool_call_begin|> \"functions.f:\" /[0-9]{1,4}/ <|tool_call_argument_begin|> arguments_0 <|tool_call_end|>\n\
             call: call_0\n",
        ),
        (
            ToolFormat::Mistral,
            true,
            "start: call call*\n\
             arguments_0: %json {\"type\":\"object\"}\n\
             call_0: \"[TOOL_CALLS]\" \"f\" \"[ARGS]\" arguments_0\n\
             call: call_0\n",
        ),
    ];
    for (format, parallel, expected) in cases {
        assert_eq!(grammar(None, format, &tools, parallel), expected);
    }
    let text = grammar(None, ToolFormat::Qwen3Coder, &[weather()], false);
    let expected = "start: call\n\
        value_0_0[suffix=\"\\n</parameter>\"]: /(.|\\n)*/\n\
        parameter_0_0: \"<parameter=city>\\n\" value_0_0 \"\\n\"\n\
        parameter_0_1: \"<parameter=unit>\\n\" (\"C\" | \"F\") \"\\n</parameter>\" \"\\n\"\n\
        value_0_2: %json {\"type\":\"integer\"}\n\
        parameter_0_2: \"<parameter=days>\\n\" value_0_2 \"\\n</parameter>\" \"\\n\"\n\
        call_0: \"<tool_call>\" \"\\n<function=get_weather>\\n\" parameter_0_0 parameter_0_1? parameter_0_2? \"</function>\\n\" \"</tool_call>\"\n\
        call: call_0\n";
    assert_eq!(text, expected);
}

#[test]
fn reasoning_may_come_first_and_must_end_where_the_prompt_opened_it() {
    let dialect = Dialect { reasoning: Some(ReasoningFormat::Think), tools: Some(ToolFormat::Hermes) };
    let tools = [tool("f", json!({}))];
    let text = dialect.call_grammar(ToolFormat::Hermes, &tools, false);
    assert!(text.starts_with("start: thought? call\nthinking[suffix=\"</think>\"]: /(.|\\n)*/\n"), "{text}");
    assert!(text.contains("thought: \"<think>\" thinking \"\\n\\n\"?\n"), "{text}");
    let tokenizer = byte_tokenizer();
    let text =
        dialect.call_grammar_for(&tokenizer, AnswerStart::Reasoning, ToolFormat::Hermes, &tools, false);
    assert!(text.starts_with("start: thought call\n"), "{text}");
    assert!(text.contains("thought: thinking \"\\n\\n\"?\n"), "{text}");
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
        text.contains("\"additionalProperties\":false,\"$defs\":{\"point\":{\"type\":\"array\"}}}"),
        "{text}"
    );
    let text = grammar(None, ToolFormat::Glm45, &tools, false);
    assert!(
        text.contains("%json {\"$ref\":\"#/$defs/point\",\"$defs\":{\"point\":{\"type\":\"array\"}}}"),
        "{text}"
    );
}
