//! Each format by its published examples, and by what models do beside them.

use super::*;

fn check(format: ToolFormat, cases: &[(&str, &str)]) {
    for (text, expected) in cases {
        let read = line(dialect(None, Some(format)), AnswerStart::Content, text);
        assert_eq!(read, *expected, "{} {text:?}", format.name());
    }
}

#[test]
fn hermes() {
    check(
        ToolFormat::Hermes,
        &[
            (
                "<tool_call>\n{\"name\": \"get_weather\", \"arguments\": {\"city\": \"Paris\"}}\n</tool_call>",
                "@get_weather{\"city\": \"Paris\"}",
            ),
            (
                "Two:\n<tool_call>\n{\"name\": \"f\", \"arguments\": {}}\n</tool_call>\n<tool_call>\n{\"name\": \"g\", \"arguments\": {\"a\": [1]}}\n</tool_call>",
                "Two:\n@f{}@g{\"a\": [1]}",
            ),
            // Keys in another order, others beside them, none of arguments, and both of the usual keys.
            (
                "<tool_call>{\"arguments\": {\"name\": \"x\"}, \"name\": \"f\"}</tool_call>",
                "@f{\"name\": \"x\"}",
            ),
            (
                "<tool_call>{\"id\": 7, \"name\": \"f\", \"parameters\": {\"a\": 1}}</tool_call>",
                "@f{\"a\": 1}",
            ),
            ("<tool_call>{\"name\": \"f\"}</tool_call>", "@f{}"),
            ("<tool_call>{\"name\": \"f\", \"arguments\": null}</tool_call>", "@f{}"),
            ("<tool_call>{\"name\": \"f\", \"arguments\": \"{\\\"a\\\": 1}\"}</tool_call>", "@f{\"a\": 1}"),
            // A bracket too few or too many, no closing tag, two objects in one.
            ("<tool_call>{\"name\": \"f\", \"arguments\": {\"a\": 1}</tool_call> ok", "@f{\"a\": 1} ok"),
            ("<tool_call>{\"name\": \"f\", \"arguments\": {\"a\": \"b\"</tool_call>ok", "@f{\"a\": \"b\"}ok"),
            ("<tool_call>{\"name\": \"f\", \"arguments\": {\"a\": 1}}}\n</tool_call>", "@f{\"a\": 1}"),
            ("<tool_call>{\"name\": \"f\", \"arguments\": {}}\nso", "@f{}\nso"),
            (
                "<tool_call>{\"name\": \"f\", \"arguments\": {}}\n{\"name\": \"g\", \"arguments\": {}}</tool_call>",
                "@f{}@g{}",
            ),
            // The closing tag within a string is text.
            (
                "<tool_call>{\"name\": \"f\", \"arguments\": {\"s\": \"</tool_call>\"}}</tool_call>",
                "@f{\"s\": \"</tool_call>\"}",
            ),
            // No call: nothing is lost.
            ("<tool_call>none</tool_call>", "<tool_call>none</tool_call>"),
            ("<tool_call>{\"arguments\": {}}</tool_call>", "<tool_call>{\"arguments\": {}}</tool_call>"),
            ("<tool_call>{\"name\": 5}</tool_call>", "<tool_call>{\"name\": 5}</tool_call>"),
            ("<tool_call>{\"name\": \"\"}</tool_call>", "<tool_call>{\"name\": \"\"}</tool_call>"),
            ("<tool_call>", "<tool_call>"),
            ("<tool_call><tool_call>{\"name\": \"f\", \"arguments\": {}}</tool_call>", "<tool_call>@f{}"),
        ],
    );
}

#[test]
fn qwen3_coder() {
    check(
        ToolFormat::Qwen3Coder,
        &[
            (
                "<tool_call>\n<function=get_weather>\n<parameter=s>\nvalue\nof two lines\n</parameter>\n<parameter=n>\n3\n</parameter>\n</function>\n</tool_call>",
                "@get_weather{\"s\": \"value\\nof two lines\", \"n\": 3}",
            ),
            ("<tool_call>\n<function=f>\n</function>\n</tool_call>", "@f{}"),
            (
                "<tool_call>\n<function=f>\n<parameter=s>\n\n</parameter>\n</function>\n</tool_call>",
                "@f{\"s\": \"\"}",
            ),
            // Line breaks of the value itself stay.
            (
                "<tool_call><function=f><parameter=s>\n\na\n\n</parameter></function></tool_call>",
                "@f{\"s\": \"\\na\\n\"}",
            ),
            ("<tool_call><function=f><parameter=s>a</parameter></function></tool_call>", "@f{\"s\": \"a\"}"),
            // Without the outer tag, without the end of a parameter, of the function.
            ("<function=f>\n<parameter=n>\n1\n</parameter>\n</function>\nso", "@f{\"n\": 1}\nso"),
            (
                "<tool_call>\n<function=f>\n<parameter=n>\n1\n<parameter=s>\nx\n</function>\n</tool_call>",
                "@f{\"n\": 1, \"s\": \"x\"}",
            ),
            ("<tool_call><function=f><parameter=n>1</parameter></tool_call>", "@f{\"n\": 1}"),
            // Types as declared, and a string where the value isn't of it.
            (
                "<tool_call><function=f><parameter=n>many</parameter><parameter=b>True</parameter><parameter=o>{\"a\": [1]}</parameter><parameter=s>5</parameter></function></tool_call>",
                "@f{\"n\": \"many\", \"b\": true, \"o\": {\"a\": [1]}, \"s\": \"5\"}",
            ),
            // No call.
            ("write <function=name> first", "write <function=name> first"),
            ("<tool_call>\nnone\n</tool_call>", "<tool_call>\nnone\n</tool_call>"),
            ("<tool_call></tool_call>", "<tool_call></tool_call>"),
            ("<tool_call><function=></function>", "<tool_call><function=></function>"),
        ],
    );
}

#[test]
fn llama3_json() {
    check(
        ToolFormat::Llama3Json,
        &[
            (
                "{\"name\": \"get_weather\", \"parameters\": {\"city\": \"Paris\"}}",
                "@get_weather{\"city\": \"Paris\"}",
            ),
            ("<|python_tag|>{\"name\": \"nobody\", \"parameters\": {\"q\": {}}}", "@nobody{\"q\": {}}"),
            ("{\"type\": \"function\", \"name\": \"f\", \"parameters\": {}}", "@f{}"),
            (
                "\n{\"name\": \"f\", \"arguments\": {}}; {\"name\": \"f\", \"parameters\": {\"a\": 1}}",
                "@f{}@f{\"a\": 1}",
            ),
            ("{\"name\": \"f\", \"parameters\": {}}\n{\"name\": \"f\", \"parameters\": {}}", "@f{}@f{}"),
            ("{\"name\": \"f\", \"parameters\": {}} I used {f}.", "@f{} I used {f}."),
            // Any other JSON is an answer in JSON.
            ("{\"name\": \"nobody\", \"parameters\": {}}", "{\"name\": \"nobody\", \"parameters\": {}}"),
            ("{\"name\": \"f\", \"age\": 3}", "{\"name\": \"f\", \"age\": 3}"),
            ("{\"parameters\": {}}", "{\"parameters\": {}}"),
            ("{\"a\": [1, 2]}", "{\"a\": [1, 2]}"),
            ("Use {\"name\": \"f\", \"parameters\": {}}", "Use {\"name\": \"f\", \"parameters\": {}}"),
            ("<|python_tag|>print(1)", "<|python_tag|>print(1)"),
            ("{", "{"),
        ],
    );
}

#[test]
fn mistral() {
    check(
        ToolFormat::Mistral,
        &[
            (
                "[TOOL_CALLS][{\"name\": \"add\", \"arguments\":{\"a\": 3.5, \"b\": 4}}]",
                "@add{\"a\": 3.5, \"b\": 4}",
            ),
            (
                "[TOOL_CALLS]  [ {\"name\":\"add\" , \"arguments\" : {\"a\": 3} } , {\"arguments\": {\"name\": \"x\"}, \"name\": \"g\"} ]\nmore",
                "@add{\"a\": 3}@g{\"name\": \"x\"}\nmore",
            ),
            (
                "Hello[TOOL_CALLS]add{\"a\": 3.5}[TOOL_CALLS]multiply{\"a\": 3}",
                "Hello@add{\"a\": 3.5}@multiply{\"a\": 3}",
            ),
            ("[TOOL_CALLS]add[ARGS]{\"a\": 1}[TOOL_CALLS]g[ARGS]{}", "@add{\"a\": 1}@g{}"),
            ("[TOOL_CALLS]add[CALL_ID]abcdefghi[ARGS]{\"a\": 1}", "@abcdefghi=add{\"a\": 1}"),
            (
                "hi{hi[TOOL_CALLS]bash{\"c\": \"re.compile(r'{}')\"}",
                "hi{hi@bash{\"c\": \"re.compile(r'{}')\"}",
            ),
            ("[TOOL_CALLS]f[ARGS]{\"a\": 1 [TOOL_CALLS]g[ARGS]{}", "@f{\"a\": 1 }@g{}"),
            // No call.
            ("[TOOL_CALLS] not json at all", "[TOOL_CALLS] not json at all"),
            ("[TOOL_CALLS][]", "[TOOL_CALLS][]"),
            ("[TOOL_CALLS]toolname", "[TOOL_CALLS]toolname"),
            ("[TOOL_CALLS][1, 2]", "[TOOL_CALLS][1, 2]"),
        ],
    );
}

#[test]
fn deepseek_v3() {
    check(
        ToolFormat::DeepseekV3,
        &[
            (
                "I look.<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>get_weather\n```json\n{\"city\": \"Paris\"}\n```<｜tool▁call▁end｜>\n<｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```json\n{}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
                "I look.@get_weather{\"city\": \"Paris\"}@f{}",
            ),
            (
                "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```json\n{\"a\": \"```\"}\n```<｜tool▁call▁end｜><｜tool▁calls▁end｜> so",
                "@f{\"a\": \"```\"} so",
            ),
            ("<｜tool▁calls▁begin｜>nothing", "<｜tool▁calls▁begin｜>nothing"),
            ("<｜tool▁calls▁begin｜><｜tool▁calls▁end｜>", "<｜tool▁calls▁begin｜><｜tool▁calls▁end｜>"),
        ],
    );
}

#[test]
fn deepseek_v31() {
    check(
        ToolFormat::DeepseekV31,
        &[
            (
                "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>get_weather<｜tool▁sep｜>{\"city\": \"Paris\"}<｜tool▁call▁end｜><｜tool▁call▁begin｜>f<｜tool▁sep｜>{}<｜tool▁call▁end｜><｜tool▁calls▁end｜>",
                "@get_weather{\"city\": \"Paris\"}@f{}",
            ),
            (
                "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f<｜tool▁sep｜>{\"a\": [1<｜tool▁call▁end｜><｜tool▁call▁begin｜>g<｜tool▁sep｜><｜tool▁call▁end｜><｜tool▁calls▁end｜>",
                "@f{\"a\": [1@g{}",
            ),
            (
                "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>f<｜tool▁sep｜>{}<｜tool▁call▁end｜>text",
                "@f{}text",
            ),
        ],
    );
}

#[test]
fn deepseek_v4() {
    check(
        ToolFormat::DeepseekV4,
        &[
            (
                "Let me check. <｜DSML｜tool_calls>\n<｜DSML｜invoke name=\"get_weather\">\n<｜DSML｜parameter name=\"location\" string=\"true\">Beijing</｜DSML｜parameter>\n<｜DSML｜parameter name=\"days\" string=\"false\">3</｜DSML｜parameter>\n</｜DSML｜invoke>\n</｜DSML｜tool_calls>",
                "Let me check. @get_weather{\"location\": \"Beijing\", \"days\": 3}",
            ),
            // The tag decides where the declaration leaves a choice or there is none.
            (
                "<｜DSML｜tool_calls><｜DSML｜invoke name=\"f\"><｜DSML｜parameter name=\"u\" string=\"true\">null</｜DSML｜parameter><｜DSML｜parameter name=\"n\" string=\"true\">3</｜DSML｜parameter><｜DSML｜parameter name=\"s\" string=\"false\">3</｜DSML｜parameter><｜DSML｜parameter name=\"w\" string=\"true\">3</｜DSML｜parameter></｜DSML｜invoke></｜DSML｜tool_calls>",
                "@f{\"u\": \"null\", \"n\": 3, \"s\": \"3\", \"w\": \"3\"}",
            ),
            (
                "<｜DSML｜function_calls>\n<｜DSML｜invoke name=\"f\">\n</｜DSML｜invoke>\n<｜DSML｜invoke name=\"g\">\n</｜DSML｜invoke>\n</｜DSML｜function_calls>",
                "@f{}@g{}",
            ),
            ("about <｜DSML｜tool_calls> as text", "about <｜DSML｜tool_calls> as text"),
        ],
    );
}

#[test]
fn kimi_k2() {
    check(
        ToolFormat::KimiK2,
        &[
            (
                "I'll check. <|tool_calls_section_begin|><|tool_call_begin|>functions.get_weather:0<|tool_call_argument_begin|>{\"city\": \"Beijing\"}<|tool_call_end|><|tool_call_begin|>functions.f:1 <|tool_call_argument_begin|>{\"html\": \"<div>\"} <|tool_call_end|><|tool_calls_section_end|>",
                "I'll check. @functions.get_weather:0=get_weather{\"city\": \"Beijing\"}@functions.f:1=f{\"html\": \"<div>\"}",
            ),
            (
                "<|tool_calls_section_begin|><|tool_call_begin|>get_weather:0<|tool_call_argument_begin|>{}<|tool_call_end|><|tool_calls_section_end|>",
                "@get_weather:0=get_weather{}",
            ),
            // A name without a number, a number without a name, and arguments without an end.
            (
                "<|tool_calls_section_begin|><|tool_call_begin|>functions.f.0<|tool_call_argument_begin|>{}<|tool_call_end|><|tool_calls_section_end|>",
                "@f.0{}",
            ),
            (
                "<|tool_calls_section_begin|><|tool_call_begin|>0<|tool_call_argument_begin|>{}",
                "<|tool_calls_section_begin|><|tool_call_begin|>0<|tool_call_argument_begin|>{}",
            ),
            (
                "<|tool_calls_section_begin|><|tool_call_begin|>functions.bad:0<|tool_call_argument_begin|>{\"city\": \"Beijing\"<|tool_call_end|><|tool_call_begin|>functions.good:1<|tool_call_argument_begin|>{}<|tool_call_end|><|tool_calls_section_end|>",
                "@functions.bad:0=bad{\"city\": \"Beijing\"}@functions.good:1=good{}",
            ),
        ],
    );
    // Reasoning that wasn't closed ends with a call, and is reasoning if it is none.
    let kimi = dialect(Some(ReasoningFormat::KimiK2), Some(ToolFormat::KimiK2));
    let call = "<|tool_calls_section_begin|><|tool_call_begin|>functions.f:0<|tool_call_argument_begin|>{}<|tool_call_end|><|tool_calls_section_end|>";
    assert_eq!(line(kimi, AnswerStart::Reasoning, &format!("hm {call}so")), "[hm ]@functions.f:0=f{}so");
    let cut = "hm <|tool_calls_section_begin|> is the marker";
    assert_eq!(line(kimi, AnswerStart::Reasoning, cut), format!("[{cut}]"));
}

#[test]
fn glm45() {
    check(
        ToolFormat::Glm45,
        &[
            (
                "<tool_call>get_weather\n<arg_key>s</arg_key>\n<arg_value>Paris</arg_value>\n<arg_key>n</arg_key>\n<arg_value>3</arg_value>\n</tool_call>",
                "@get_weather{\"s\": \"Paris\", \"n\": 3}",
            ),
            (
                "<tool_call>f<arg_key>o</arg_key><arg_value>{\"a\": \"<\"}</arg_value></tool_call>",
                "@f{\"o\": {\"a\": \"<\"}}",
            ),
            ("ok\n<tool_call>f</tool_call>\n<tool_call>g\n</tool_call>", "ok\n@f{}@g{}"),
            ("<tool_call>f\n<arg_key>s</arg_key>\noh", "@f{}oh"),
            // No call.
            ("the <tool_call> tag", "the <tool_call> tag"),
            ("<tool_call></tool_call>", "<tool_call></tool_call>"),
            ("<tool_call>{\"name\": \"f\"}</tool_call>", "<tool_call>{\"name\": \"f\"}</tool_call>"),
        ],
    );
}

#[test]
fn minimax_m2() {
    check(
        ToolFormat::MinimaxM2,
        &[
            (
                "<minimax:tool_call>\n<invoke name=\"get_weather\">\n<parameter name=\"s\">Paris\n</parameter>\n<parameter name=\"a\">[1, 2]</parameter>\n</invoke>\n<invoke name=\"f\">\n</invoke>\n</minimax:tool_call>",
                "@get_weather{\"s\": \"Paris\\n\", \"a\": [1, 2]}@f{}",
            ),
            ("<minimax:tool_call>\nnone", "<minimax:tool_call>\nnone"),
            ("<minimax:tool_call><invoke name=\"f\">text</invoke>", "@f{}text</invoke>"),
        ],
    );
}

#[test]
fn harmony() {
    let harmony = dialect(Some(ReasoningFormat::Harmony), Some(ToolFormat::Harmony));
    let cases = [
        (
            "<|channel|>analysis<|message|>User asks: \"What is 2 + 2?\"<|end|>\n<|start|>assistant<|channel|>final<|message|>2 + 2 = 4.<|return|>",
            "[User asks: \"What is 2 + 2?\"]2 + 2 = 4.",
        ),
        (
            "<|channel|>analysis<|message|>Need to use function get_weather.<|end|><|start|>assistant<|channel|>commentary to=functions.get_weather <|constrain|>json<|message|>{\"location\":\"San Francisco\"}<|call|>",
            "[Need to use function get_weather.]@get_weather{\"location\":\"San Francisco\"}",
        ),
        // The recipient before the channel, also where the prompt has the role.
        (
            "<|start|>assistant to=functions.f<|channel|>commentary json<|message|>{\"a\": 1}<|call|>",
            "@f{\"a\": 1}",
        ),
        (" to=functions.f<|channel|>commentary json<|message|>{\"a\": 1}", "@f{\"a\": 1}"),
        // A preamble, then two calls without a word between them.
        (
            "<|channel|>commentary<|message|>**Plan**<|end|><|start|>assistant<|channel|>commentary to=functions.f<|constrain|>json<|message|>{\"a\": \"<|x|>\"}<|call|><|start|>assistant<|channel|>commentary to=functions.g<|message|>{}<|end|>",
            "**Plan**@f{\"a\": \"<|x|>\"}@g{}",
        ),
        // Messages without an end, without a channel, and no message at all.
        ("<|channel|>analysis<|message|>a<|channel|>final<|message|>b", "[a]b"),
        ("<|start|>assistant<|message|>The answer.<|return|>", "The answer."),
        ("Hello <b>there</b>.", "Hello <b>there</b>."),
        ("<|channel|>final<|mess", ""),
        ("<|channel|>final<|message|>a <| b <|en", "a <| b <|en"),
    ];
    for (text, expected) in cases {
        assert_eq!(line(harmony, AnswerStart::Content, text), expected, "{text:?}");
    }
    let alone = dialect(None, Some(ToolFormat::Harmony));
    assert_eq!(line(alone, AnswerStart::Content, cases[0].0), "User asks: \"What is 2 + 2?\"2 + 2 = 4.");
    assert_eq!(
        line(harmony, AnswerStart::Reasoning, "so<|end|><|start|>assistant<|channel|>final<|message|>b"),
        "[so]b"
    );
}
