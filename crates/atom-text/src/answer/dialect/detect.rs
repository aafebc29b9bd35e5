//! The dialect of a chat template, from what it writes.

use super::{Dialect, ToolFormat};
use crate::answer::ReasoningFormat;
use crate::{ChatTemplate, TemplateInput};
use serde_json::{Value, json};

/// A name that no template has in its own text.
const PROBE: &str = "atom_probe";

pub(super) fn detect(template: &ChatTemplate) -> Dialect {
    Dialect { reasoning: reasoning(template), tools: tools(template) }
}

/// Renders a conversation in which the probe was called. Most templates take arguments as an object, some
/// only as text; DeepSeek's own write a call only where there is no content at all.
fn tools(template: &ChatTemplate) -> Option<ToolFormat> {
    let arguments = [json!({"key": "value"}), json!("{\"key\": \"value\"}")];
    let ways = arguments.iter().flat_map(|arguments| [(json!(""), arguments), (Value::Null, arguments)]);
    ways.filter_map(|(content, arguments)| called(template, &content, arguments))
        .find_map(|text| written(&text))
}

/// The conversation as the template writes it. A template that knows no tools doesn't write the probe's name.
fn called(template: &ChatTemplate, content: &Value, arguments: &Value) -> Option<String> {
    // Nine letters and digits: Mistral's templates insist.
    let id = "probe0001";
    let parameters = json!({"type": "object", "properties": {"key": {"type": "string"}}});
    let tools = json!([{"type": "function", "function": {"name": PROBE, "description": "", "parameters": parameters}}]);
    let call = json!({"id": id, "type": "function", "function": {"name": PROBE, "arguments": arguments}});
    let messages = json!([
        {"role": "user", "content": "q"},
        {"role": "assistant", "content": content, "reasoning_content": "r", "tool_calls": [call]},
        {"role": "tool", "tool_call_id": id, "name": PROBE, "content": "a"},
    ]);
    let text = render(template, &messages, Some(&tools))?;
    text.contains(PROBE).then_some(text)
}

fn render(template: &ChatTemplate, messages: &Value, tools: Option<&Value>) -> Option<String> {
    // The date plays no part.
    let input = TemplateInput { messages, tools, add_generation_prompt: true, kwargs: None, now_unix_s: 0 };
    template.render(&input).ok()
}

/// The format of a rendered call.
fn written(text: &str) -> Option<ToolFormat> {
    let llama = format!("{{\"name\": \"{PROBE}\", \"parameters\": ");
    let found = CALLS.iter().find(|(_, markers)| markers.iter().all(|marker| text.contains(marker)));
    found.map(|(format, _)| *format).or_else(|| text.contains(&llama).then_some(ToolFormat::Llama3Json))
}

/// What a rendered call has in each format. Where one has the markers of another and more, it comes first.
const CALLS: [(ToolFormat, &[&str]); 10] = [
    (ToolFormat::Harmony, &["<|channel|>", "<|message|>"]),
    (ToolFormat::DeepseekV4, &["｜DSML｜"]),
    (ToolFormat::DeepseekV3, &["<｜tool▁calls▁begin｜>", "```json"]),
    (ToolFormat::DeepseekV31, &["<｜tool▁calls▁begin｜>"]),
    (ToolFormat::KimiK2, &["<|tool_calls_section_begin|>"]),
    (ToolFormat::Mistral, &["[TOOL_CALLS]"]),
    (ToolFormat::MinimaxM2, &["<minimax:tool_call>"]),
    (ToolFormat::Glm45, &["<tool_call>", "<arg_key>"]),
    (ToolFormat::Qwen3Coder, &["<tool_call>", "<function="]),
    (ToolFormat::Hermes, &["<tool_call>"]),
];

/// Reasoning shows in the template's source: many write it only for turns that a probe doesn't have. A
/// template that fails on the plainest question has none.
fn reasoning(template: &ChatTemplate) -> Option<ReasoningFormat> {
    render(template, &json!([{"role": "user", "content": "q"}]), None)?;
    let source = template.source();
    let found = REASONING.iter().find(|(_, markers)| markers.iter().all(|marker| source.contains(marker)));
    found.map(|(format, _)| *format)
}

/// What the source of a template has in each format, likewise.
const REASONING: [(ReasoningFormat, &[&str]); 5] = [
    (ReasoningFormat::Harmony, &["<|channel|>", "analysis"]),
    (ReasoningFormat::MinimaxM3, &["</mm:think>"]),
    (ReasoningFormat::Mistral, &["[/THINK]"]),
    (ReasoningFormat::KimiK2, &["</think>", "<|tool_calls_section_begin|>"]),
    (ReasoningFormat::Think, &["</think>"]),
];

#[cfg(test)]
mod tests {
    use super::*;
    use crate::TokenizerSource;
    use crate::testing::{byte_tokenizer, byte_vocabulary};

    /// A template that lists tools and writes calls as `call`, with `c` for the function of one.
    fn template(call: &str) -> String {
        format!(
            "{{%- for tool in tools or [] %}}{{{{ tool | tojson }}}}\n{{%- endfor %}}\
             {{%- for m in messages %}}[{{{{ m.role }}}}]{{{{ m.content }}}}\
             {{%- for t in m.tool_calls or [] %}}{{%- set c = t.function %}}{call}{{%- endfor %}}\
             {{%- endfor %}}[assistant]"
        )
    }

    fn detected(source: &str) -> Dialect {
        let vocabulary = TokenizerSource::Gguf(byte_vocabulary());
        Dialect::detect(&ChatTemplate::load(&vocabulary, &byte_tokenizer(), Some(source)).unwrap())
    }

    #[test]
    fn the_format_of_calls_is_read_off_a_rendered_call() {
        let pairs = "{%- for k, v in c.arguments | items %}KEY{{ k }}MID{{ v }}END{%- endfor %}";
        let tagged = |head: &str, key: &str, mid: &str, end: &str| {
            head.to_owned() + &pairs.replace("KEY", key).replace("MID", mid).replace("END", end)
        };
        let cases = [
            (
                "<tool_call>{\"name\": \"{{ c.name }}\", \"arguments\": {{ c.arguments | tojson }}}</tool_call>"
                    .to_owned(),
                ToolFormat::Hermes,
            ),
            (
                tagged("<tool_call><function={{ c.name }}>", "<parameter=", ">", "</parameter>"),
                ToolFormat::Qwen3Coder,
            ),
            (
                "{\"name\": \"{{ c.name }}\", \"parameters\": {{ c.arguments | tojson }}}".to_owned(),
                ToolFormat::Llama3Json,
            ),
            ("[TOOL_CALLS]{{ c.name }}[ARGS]{{ c.arguments | tojson }}".to_owned(), ToolFormat::Mistral),
            (
                "{%- if m.content is none %}[TOOL_CALLS]{{ c.name }}{%- endif %}".to_owned(),
                ToolFormat::Mistral,
            ),
            // These two add text to text, so they fail on an object.
            (
                "{{ '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>' + c.name + '\n```json\n' + c.arguments + '\n```' }}"
                    .to_owned(),
                ToolFormat::DeepseekV3,
            ),
            (
                "{{ '<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>' + c.name + '<｜tool▁sep｜>' + c.arguments }}"
                    .to_owned(),
                ToolFormat::DeepseekV31,
            ),
            (
                tagged("<｜DSML｜tool_calls><｜DSML｜invoke name=\"{{ c.name }}\">", "<｜DSML｜parameter name=\"", "\">", ""),
                ToolFormat::DeepseekV4,
            ),
            (
                "<|tool_calls_section_begin|><|tool_call_begin|>{{ t.id }}<|tool_call_argument_begin|>{{ c.arguments | tojson }}"
                    .to_owned(),
                ToolFormat::KimiK2,
            ),
            (tagged("<tool_call>{{ c.name }}\n", "<arg_key>", "</arg_key><arg_value>", "</arg_value>"), ToolFormat::Glm45),
            (
                tagged("<minimax:tool_call><invoke name=\"{{ c.name }}\">", "<parameter name=\"", "\">", "</parameter>"),
                ToolFormat::MinimaxM2,
            ),
            (
                "<|start|>assistant to=functions.{{ c.name }}<|channel|>commentary json<|message|>{{ c.arguments | tojson }}<|call|>"
                    .to_owned(),
                ToolFormat::Harmony,
            ),
        ];
        for (call, expected) in cases {
            assert_eq!(detected(&template(&call)).tools, Some(expected), "{call}");
        }
    }

    #[test]
    fn a_template_without_tools_or_that_fails_has_no_format() {
        let none = [
            "{{ messages[0].content }}".to_owned(),
            // It has a marker, but for text that clients write.
            "{%- for m in messages %}<tool_call>{{ m.content }}{%- endfor %}".to_owned(),
            "{{ raise_exception('no') }}".to_owned(),
            "<think></think>{{ raise_exception('no') }}".to_owned(),
            template("call {{ c.name }}"),
        ];
        for source in none {
            assert_eq!(detected(&source), Dialect::default(), "{source}");
        }
        let vocabulary = TokenizerSource::Gguf(byte_vocabulary());
        let absent = ChatTemplate::load(&vocabulary, &byte_tokenizer(), None).unwrap();
        assert_eq!(Dialect::detect(&absent), Dialect::default());
    }

    #[test]
    fn reasoning_is_read_off_the_source() {
        let chat = "{%- for m in messages %}{{ m.content }}{%- endfor %}";
        let cases = [
            (
                "{%- if enable_thinking %}<think>{%- else %}<think></think>{%- endif %}",
                ReasoningFormat::Think,
            ),
            ("{%- if x is defined %}[THINK]{{ x }}[/THINK]{%- endif %}", ReasoningFormat::Mistral),
            ("{%- if x is defined %}<mm:think>{{ x }}</mm:think>{%- endif %}", ReasoningFormat::MinimaxM3),
            (
                "{%- if x is defined %}<think></think><|tool_calls_section_begin|>{%- endif %}",
                ReasoningFormat::KimiK2,
            ),
            ("{%- if x is defined %}<|channel|>analysis<|message|>{%- endif %}", ReasoningFormat::Harmony),
        ];
        for (source, expected) in cases {
            assert_eq!(detected(&format!("{chat}{source}")).reasoning, Some(expected), "{source}");
        }
        assert_eq!(detected(chat).reasoning, None);
    }
}
