use super::*;
use serde_json::json;

fn tool(name: &str) -> Tool {
    Tool { name: name.into(), description: None, parameters: json!({}), strict: false }
}

/// Parts in one line: content as it is, reasoning in `[]`, calls as `@name{..}`.
fn read(dialect: Dialect, start: AnswerStart, deltas: &[&str]) -> String {
    let mut parser = AnswerParser::new(dialect, start, Arc::new([tool("f"), tool("g")]));
    let mut parts = Vec::new();
    for delta in deltas {
        parser.push(delta, &mut parts);
    }
    parser.finish(&mut parts);
    let show = |part: &AnswerPart| match part {
        AnswerPart::Content(text) => text.clone(),
        AnswerPart::Reasoning(text) => format!("[{text}]"),
        AnswerPart::Call { name, .. } => format!("@{name}"),
        AnswerPart::Arguments { json, .. } => json.clone(),
    };
    parts.iter().map(show).collect()
}

#[test]
fn hermes_with_think() {
    let dialect = Dialect { reasoning: Some(ReasoningFormat::Think), tools: Some(ToolFormat::Hermes) };
    let cases = [
        ("hello", "hello"),
        ("<think>\nhm\n</think>\n\nhello", "[hm\n]hello"),
        ("<tool_call>\n{\"name\": \"f\", \"arguments\": {\"a\": \"}\"}}\n</tool_call>", "@f{\"a\": \"}\"}"),
        ("a <tool_call> is", "a <tool_call> is"),
    ];
    for (text, expected) in cases {
        assert_eq!(read(dialect, AnswerStart::Content, &[text]), expected, "{text}");
        let chars: Vec<String> = text.chars().map(String::from).collect();
        let chars: Vec<&str> = chars.iter().map(String::as_str).collect();
        assert_eq!(read(dialect, AnswerStart::Content, &chars), expected, "{text}");
    }
}
