use super::*;
use crate::testing::{TempFolder, byte_tokenizer, byte_vocabulary};
use crate::{GgufVocabulary, flatten_messages};
use serde_json::json;

const CHATML: &str = "\
{% for message in messages %}
    {% if loop.first and message['role'] != 'system' %}
        {{- '<|im_start|>system\\nBe kind.<|im_end|>\\n' }}
    {%- endif %}
    {{- '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>' + '\\n' }}
{%- endfor %}
{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}";

/// Headers, a BOS from the tokenizer, trimmed content, a date, and a check of the order of roles.
const HEADERS: &str = "\
{{- bos_token }}
{%- set today = date_string | default(strftime_now('%d %b %Y')) %}
{%- if messages[0].role == 'system' %}
    {%- set system = messages[0].content | trim %}
    {%- set messages = messages[1:] %}
{%- else %}
    {%- set system = '' %}
{%- endif %}
{{- '<|header|>system<|/header|>\\n\\nToday: ' + today + '\\n\\n' + system + '<|eot|>' }}
{%- for message in messages %}
    {%- if (message.role == 'user') != (loop.index0 % 2 == 0) %}
        {{- raise_exception('Roles must alternate, but message ' ~ loop.index ~ ' is of ' ~ message.role) }}
    {%- endif %}
    {{- '<|header|>' + message.role + '<|/header|>\\n\\n' + message.content | trim + '<|eot|>' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|header|>assistant<|/header|>\\n\\n' }}
{%- endif %}";

/// Tools as JSON lines, tool calls, tool answers grouped into one turn, and a switch for thinking.
const TOOLS: &str = "\
{%- if tools %}
    {{- '<s>system\\n' }}
    {%- if messages[0].role == 'system' %}{{- messages[0].content + '\\n\\n' }}{%- endif %}
    {%- for tool in tools %}{{- '\\n' }}{{- tool | tojson }}{%- endfor %}
    {{- '</s>\\n' }}
{%- elif messages[0].role == 'system' %}
    {{- '<s>system\\n' + messages[0].content + '</s>\\n' }}
{%- endif %}
{%- set ns = namespace(last_user=-1) %}
{%- for message in messages[::-1] %}
    {%- if message.role == 'user' %}
        {%- set ns.last_user = messages|length - 1 - loop.index0 %}
        {%- break %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- if message.role == 'system' %}{%- continue %}{%- endif %}
    {%- if message.role == 'tool' %}
        {%- if loop.previtem.role != 'tool' %}{{- '<s>user' }}{%- endif %}
        {{- '\\n<answer>' + message.content + '</answer>' }}
        {%- if loop.last or loop.nextitem.role != 'tool' %}{{- '</s>\\n' }}{%- endif %}
        {%- continue %}
    {%- endif %}
    {%- set content = message.content or '' %}
    {%- if loop.index0 < ns.last_user and '</think>' in content %}
        {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
    {%- endif %}
    {{- '<s>' + message.role + '\\n' + content }}
    {%- for call in message.tool_calls or [] %}
        {{- '\\n<call>' + call.function.name + ' ' + call.function.arguments | tojson + '</call>' }}
    {%- endfor %}
    {{- '</s>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<s>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}{{- '<think></think>\\n' }}{%- endif %}
{%- endif %}";

fn compile(template: &str) -> Result<ChatTemplate, TextError> {
    let source = TokenizerSource::Gguf(byte_vocabulary());
    ChatTemplate::load(&source, &byte_tokenizer(), Some(template))
}

/// 29 February 2024, 12:00 UTC.
const NOON: i64 = 1_709_208_000;

fn input(messages: &Json) -> TemplateInput<'_> {
    TemplateInput { messages, tools: None, add_generation_prompt: true, kwargs: None, now_unix_s: NOON }
}

fn render(template: &str, messages: &Json) -> Result<String, TextError> {
    compile(template)?.render(&input(messages))
}

fn dialogue() -> Json {
    json!([
        {"role": "user", "content": " hi "},
        {"role": "assistant", "content": "yo"},
        {"role": "user", "content": "bye"},
    ])
}

#[test]
fn a_chatml_template_renders_turns_and_a_default_system_message() {
    assert_eq!(
        render(CHATML, &json!([{"role": "user", "content": "hi"}])).unwrap(),
        "<|im_start|>system\nBe kind.<|im_end|>\n<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    );
    let messages = json!([{"role": "system", "content": "s"}, {"role": "user", "content": "<|im_end|>"}]);
    let bare = TemplateInput { add_generation_prompt: false, ..input(&messages) };
    assert_eq!(
        compile(CHATML).unwrap().render(&bare).unwrap(),
        "<|im_start|>system\ns<|im_end|>\n<|im_start|>user\n<|im_end|><|im_end|>\n"
    );
}

#[test]
fn a_header_template_prints_bos_date_and_trimmed_content() {
    let expected = "<|begin|><|header|>system<|/header|>\n\nToday: 29 Feb 2024\n\n<|eot|>\
        <|header|>user<|/header|>\n\nhi<|eot|><|header|>assistant<|/header|>\n\nyo<|eot|>\
        <|header|>user<|/header|>\n\nbye<|eot|><|header|>assistant<|/header|>\n\n";
    assert_eq!(render(HEADERS, &dialogue()).unwrap(), expected);

    let kwargs = json!({"date_string": "today"});
    let messages = json!([{"role": "system", "content": " sys\n"}, {"role": "user", "content": "hi"}]);
    let dated = TemplateInput { kwargs: kwargs.as_object(), ..input(&messages) };
    assert_eq!(
        compile(HEADERS).unwrap().render(&dated).unwrap(),
        "<|begin|><|header|>system<|/header|>\n\nToday: today\n\nsys<|eot|>\
         <|header|>user<|/header|>\n\nhi<|eot|><|header|>assistant<|/header|>\n\n"
    );
}

#[test]
fn a_tool_template_renders_definitions_calls_and_answers() {
    let messages = json!([
        {"role": "system", "content": "sys"},
        {"role": "user", "content": "weather?"},
        {"role": "assistant", "content": "<think>hm</think>\n\nlet me see", "tool_calls": [
            {"type": "function", "function": {"name": "get", "arguments": {"city": "Zürich <&>", "n": 1}}},
            {"type": "function", "function": {"name": "get", "arguments": {}}},
        ]},
        {"role": "tool", "content": "3"},
        {"role": "tool", "content": "4"},
        {"role": "user", "content": "and?"},
    ]);
    let tools =
        json!([{"type": "function", "function": {"name": "get", "parameters": {"b": [], "a": null}}}]);
    let kwargs = json!({"enable_thinking": false});
    let full = TemplateInput { tools: Some(&tools), kwargs: kwargs.as_object(), ..input(&messages) };
    assert_eq!(
        compile(TOOLS).unwrap().render(&full).unwrap(),
        "<s>system\nsys\n\n\n\
         {\"type\": \"function\", \"function\": {\"name\": \"get\", \"parameters\": {\"b\": [], \"a\": null}}}</s>\n\
         <s>user\nweather?</s>\n\
         <s>assistant\nlet me see\n<call>get {\"city\": \"Zürich <&>\", \"n\": 1}</call>\n<call>get {}</call></s>\n\
         <s>user\n<answer>3</answer>\n<answer>4</answer></s>\n\
         <s>user\nand?</s>\n\
         <s>assistant\n<think></think>\n"
    );
}

#[test]
fn templates_behave_as_in_python() {
    let kwargs = json!({
        "x": {
            "n": 5, "s": "é\"\\\n\t\u{7f}\u{2028}<>&'", "l": [1, 2, 3], "f": 1.0, "big": 1e20, "e": 1.5e-7,
            "b": true, "o": {"k": null}, "u": "日本🦀", "c": "\u{1}\u{1f}",
        },
        "y": {"type": "array", "items": "it"},
    });
    let messages = dialogue();
    let input = TemplateInput { kwargs: kwargs.as_object(), ..input(&messages) };
    for (template, expected) in PYTHON_CASES {
        let rendered = compile(template).and_then(|compiled| compiled.render(&input));
        assert_eq!(rendered.as_deref().ok(), Some(*expected), "{template}: {rendered:?}");
    }
}

#[test]
fn a_refusal_carries_the_templates_own_words() {
    let messages = json!([{"role": "assistant", "content": "a"}]);
    let error = render(HEADERS, &messages).unwrap_err();
    assert!(error.is_clients_fault());
    match error {
        TextError::TemplateRefused { message } => {
            assert_eq!(message, "Roles must alternate, but message 1 is of assistant");
        }
        other => panic!("{other:?}"),
    }
    // From within a macro too, where the engine wraps the error.
    let nested = "{% macro m() %}{{ raise_exception('no ' ~ 'way') }}{% endmacro %}{{ m() }}";
    assert!(
        matches!(render(nested, &messages), Err(TextError::TemplateRefused { message }) if message == "no way")
    );
}

#[test]
fn hostile_templates_are_errors() {
    let messages = dialogue();
    let fuel = [
        "{% for i in range(100000) %}{% for j in range(100000) %}{% endfor %}{% endfor %}",
        "{{ 'a' * 1000000000000 }}",
        "{% set ns = namespace(s='a') %}{% for i in range(100) %}{% set ns.s = ns.s + ns.s %}{% endfor %}",
        "{{ ('a' * 100000).replace('a', 'b' * 100000) }}",
        "{{ '%099999999999d'|format(1) }}",
        "{{ ''.join(['a' * 1000000] * 10000) }}",
        "{{ (['a' * 1000000] * 10000)|join }}",
        "{% for i in range(100000) %}{{ 'abcdefgh' * 2000 }}{% endfor %}",
    ];
    for template in fuel {
        let result = render(template, &messages);
        assert!(matches!(result, Err(TextError::TemplateFuel { .. })), "{template}: {result:?}");
    }
    let doubling = format!("{{% set x = [1] %}}{}{{{{ x|tojson }}}}", "{% set x = [x, x] %}".repeat(40));
    assert!(matches!(render(&doubling, &messages), Err(TextError::TemplateFuel { .. })));
    let failed = [
        ("{% macro f(x) %}{{ f(x) }}{% endmacro %}{{ f(1) }}", "recursion"),
        ("{% set ns = namespace() %}{% set ns.a = ns %}{{ ns|tojson }}", "nested deeper than"),
        ("{{ nothing.at.all }}", "undefined"),
        ("{{ nothing|tojson }}", "undefined can't be written"),
        ("{{ messages|tojson(indent=65) }}", "indent is 65"),
        ("{{ messages|tojson(separators=1) }}", ""),
        ("{{ messages|tojson(colour='red') }}", "colour"),
        ("{{ strftime_now('%Q') }}", "%Q"),
        ("{{ '{:>99999999999}'.format(1) }}", "99999999999 characters; at most 1000"),
        ("{{ messages[0].content.no_such_method() }}", "no_such_method"),
        ("{{ unknown_function() }}", "unknown_function"),
    ];
    for (template, hint) in failed {
        match render(template, &messages) {
            Err(TextError::TemplateFailed { reason }) => {
                assert!(reason.contains(hint), "{template}: {reason}")
            }
            other => panic!("{template}: {other:?}"),
        }
    }
}

#[test]
fn output_is_bounded_by_the_largest_request() {
    let messages = json!([{"role": "user", "content": "x".repeat(atom_base::limits::BODY_BYTES_MAX)}]);
    let copies = |n: usize| render(&"{{ messages[0].content }}".repeat(n), &messages);
    assert_eq!(copies(2).unwrap().len(), OUTPUT_BYTES_MAX);
    assert!(matches!(copies(3), Err(TextError::TemplateOutput { max: OUTPUT_BYTES_MAX })));
}

#[test]
fn templates_that_are_not_jinja_are_refused_when_loaded() {
    let endless = "x".repeat(300_000);
    for (template, hint) in [
        ("{% for %}", "syntax error"),
        ("{% if true %}", "syntax error"),
        ("{{ 1 + }}", "syntax error"),
        ("{{ x|no_such_filter }}", ""),
        (&endless, "300000 bytes"),
    ] {
        let result = compile(template).and_then(|compiled| compiled.render(&input(&dialogue())));
        let error = result.expect_err(template).to_string();
        assert!(error.contains(hint), "{error}");
    }
    let error = compile("a\n{% endfor %}").unwrap_err();
    assert!(error.to_string().contains(":2") && error.to_string().contains("--chat-template"), "{error}");
    assert!(!error.is_clients_fault());
}

#[test]
fn messages_tools_and_arguments_of_the_wrong_shape_are_refused_by_name() {
    let refused = |messages: Json, tools: Option<Json>, kwargs: Json| {
        let input = TemplateInput { tools: tools.as_ref(), kwargs: kwargs.as_object(), ..input(&messages) };
        compile(CHATML).unwrap().render(&input).unwrap_err().to_string()
    };
    assert_eq!(refused(json!([]), None, json!({})), "messages: is empty; at least one message is needed");
    assert_eq!(refused(json!("hi"), None, json!({})), "messages: is a string; it must be a list");
    assert_eq!(refused(json!([{}, 3]), None, json!({})), "messages[1]: is a number; it must be an object");
    assert_eq!(refused(json!([{}]), Some(json!({})), json!({})), "tools: is an object; it must be a list");
    assert_eq!(
        refused(json!([{}]), Some(json!([null])), json!({})),
        "tools[0]: is null; it must be an object"
    );
    let reserved = refused(json!([{}]), None, json!({"messages": []}));
    assert!(reserved.contains("chat_template_kwargs.messages"), "{reserved}");
}

#[test]
fn generation_marks_render_what_they_mark() {
    let template =
        "{% for m in messages %}{%- generation -%} {{ m.content }} {%- endgeneration -%};{% endfor %}";
    assert_eq!(render(template, &dialogue()).unwrap(), " hi ;yo;bye;");
}

#[test]
fn a_checkpoint_without_template_says_what_to_do() {
    let source = TokenizerSource::Gguf(byte_vocabulary());
    let template = ChatTemplate::load(&source, &byte_tokenizer(), None).unwrap();
    assert!(!template.is_present());
    let error = template.render(&input(&dialogue())).unwrap_err();
    assert!(matches!(error, TextError::NoChatTemplate));
    assert!(error.to_string().contains("/v1/completions") && error.to_string().contains("--chat-template"));
}

#[test]
fn templates_are_found_where_checkpoints_keep_them() {
    let tokenizer = byte_tokenizer();
    let messages = dialogue();
    let tools = json!([{"type": "function"}]);
    let render = |source: &TokenizerSource, tools| {
        let template = ChatTemplate::load(source, &tokenizer, None).unwrap();
        template.render(&TemplateInput { tools, ..input(&messages) }).unwrap()
    };
    let in_gguf = GgufVocabulary { chat_template: Some("gguf {{ eos_token }}".into()), ..byte_vocabulary() };
    assert_eq!(render(&TokenizerSource::Gguf(in_gguf), None), "gguf <|end|>");

    let folder = TempFolder::new();
    let source = TokenizerSource::Folder(folder.path().to_path_buf());
    folder.write("tokenizer_config.json", r#"{"chat_template": "config"}"#);
    assert_eq!(render(&source, None), "config");

    let named = json!({"chat_template": [
        {"name": "default", "template": "plain"},
        {"name": "rag", "template": "{% broken"},
        {"name": "tool_use", "template": "with {{ tools|length }} tool"},
    ]});
    folder.write("tokenizer_config.json", &named.to_string());
    assert_eq!(render(&source, None), "plain");
    assert_eq!(render(&source, Some(&tools)), "with 1 tool");

    folder.write("chat_template.jinja", "file\n");
    assert_eq!(render(&source, Some(&tools)), "file");
    let instead = ChatTemplate::load(&source, &tokenizer, Some("mine")).unwrap();
    assert_eq!(instead.render(&input(&messages)).unwrap(), "mine");

    folder.write("tokenizer_config.json", r#"{"chat_template": 5}"#);
    std::fs::remove_file(folder.path().join("chat_template.jinja")).unwrap();
    let error = ChatTemplate::load(&source, &tokenizer, None).unwrap_err().to_string();
    assert!(error.contains("must be a string or a list"), "{error}");
}

#[test]
fn a_long_conversation_renders_within_the_budget() {
    let mut messages: Vec<Json> = (0..20_000)
        .map(|turn| json!({"role": (["user", "assistant"][turn % 2]), "content": [{"type": "text", "text": "word"}]}))
        .collect();
    messages[0]["content"] = Json::String("long ".repeat(1 << 20));
    let mut messages = Json::Array(messages);
    flatten_messages(&mut messages).unwrap();
    let text = compile(TOOLS).unwrap().render(&input(&messages)).unwrap();
    assert!(text.len() > 5 << 20, "{} bytes", text.len());
}

/// Templates with what Jinja2 3.1 renders, set up as transformers sets it up, for the variables of
/// `templates_behave_as_in_python`.
#[rustfmt::skip]
const PYTHON_CASES: &[(&str, &str)] = &[
    // Templates ask whether there are tools like this; `none` is not iterable, and its length is an error.
    ("{{ tools is iterable and tools | length > 0 }}", "False"),
    ("{{ x.l is iterable and x.s is iterable and x.o is iterable and x.n is not iterable }}", "True"),
    ("{{ messages[0]['role'] }}-{{ messages[0].content }}", "user- hi "),
    ("a\n  {% if true %}\n  b\n  {% endif %}\nc\n  {# note #}\nd\n", "a\n  b\nc\nd"),
    ("{%- for m in messages -%}\n  [{{ m.role }}]\n{%- endfor %}", "[user][assistant][user]"),
    ("{{ x | tojson }}", "{\"n\": 5, \"s\": \"é\\\"\\\\\\n\\t\u{7f}\u{2028}<>&'\", \"l\": [1, 2, 3], \"f\": 1.0, \"big\": 1e+20, \"e\": 1.5e-07, \"b\": true, \"o\": {\"k\": null}, \"u\": \"日本🦀\", \"c\": \"\\u0001\\u001f\"}"),
    ("{{ x | tojson(indent=2) }}", "{\n  \"n\": 5,\n  \"s\": \"é\\\"\\\\\\n\\t\u{7f}\u{2028}<>&'\",\n  \"l\": [\n    1,\n    2,\n    3\n  ],\n  \"f\": 1.0,\n  \"big\": 1e+20,\n  \"e\": 1.5e-07,\n  \"b\": true,\n  \"o\": {\n    \"k\": null\n  },\n  \"u\": \"日本🦀\",\n  \"c\": \"\\u0001\\u001f\"\n}"),
    ("{{ x | tojson(sort_keys=true, separators=(',', ':')) }}", "{\"b\":true,\"big\":1e+20,\"c\":\"\\u0001\\u001f\",\"e\":1.5e-07,\"f\":1.0,\"l\":[1,2,3],\"n\":5,\"o\":{\"k\":null},\"s\":\"é\\\"\\\\\\n\\t\u{7f}\u{2028}<>&'\",\"u\":\"日本🦀\"}"),
    ("{{ x | tojson(ensure_ascii=true) }}", "{\"n\": 5, \"s\": \"\\u00e9\\\"\\\\\\n\\t\\u007f\\u2028<>&'\", \"l\": [1, 2, 3], \"f\": 1.0, \"big\": 1e+20, \"e\": 1.5e-07, \"b\": true, \"o\": {\"k\": null}, \"u\": \"\\u65e5\\u672c\\ud83e\\udd80\", \"c\": \"\\u0001\\u001f\"}"),
    ("{{ [] | tojson(indent=2) }}{{ {} | tojson(indent=2) }}{{ [[], {}] | tojson(indent=1) }}", "[]{}[\n [],\n {}\n]"),
    ("{{ 'a<b>&\\'\"' | tojson }}", "\"a<b>&'\\\"\""),
    ("{{ true }} {{ none }} {{ 1.0 }} {{ 10 }} {{ [1, 'a', none, true] }} {{ {'a': 1.5} }}", "True None 1.0 10 [1, 'a', None, True] {'a': 1.5}"),
    ("{% for m in messages %}{% if loop.first %}{% continue %}{% endif %}{{ loop.index0 }}{% break %}{% endfor %}", "1"),
    ("{{ '  a b '.strip() }}|{{ 'x\\n\\n'.rstrip('\\n') }}|{{ 'a,b,,c'.split(',') }}|{{ 'a b  c'.split() }}|{{ 'abc'.startswith('ab') }}|{{ 'abc'.endswith('x') }}", "a b|x|['a', 'b', '', 'c']|['a', 'b', 'c']|True|False"),
    ("{{ 'aXb'.upper() }}{{ 'aXb'.lower() }}{{ 'hello world'.title() }}{{ 'hello'.capitalize() }}{{ 'aba'.replace('a','c') }}{{ 'aba'.find('b') }}{{ 'a-b'.split('-')[-1] }}", "AXBaxbHello WorldHellocbc1b"),
    ("{% for k, v in y.items() %}{{ k }};{% endfor %}{{ y['items'] }}", "type;items;it"),
    ("{{ messages[::-1][0].content }}{{ messages[1:]|length }}{{ messages[-1].role }}{{ 'abcdef'[1:3] }}{{ 'abcdef'[-2:] }}", "bye2userbcef"),
    ("{% set ns = namespace(a=0, l=[]) %}{% for m in messages %}{% set ns.a = ns.a + 1 %}{% set ns.l = ns.l + [m.role] %}{% endfor %}{{ ns.a }}{{ ns.l }}", "3['user', 'assistant', 'user']"),
    ("{{ q is defined }}{{ x is defined }}{{ x is mapping }}{{ messages is iterable }}{{ messages is sequence }}{{ 'a' is string }}{{ none is none }}{{ x.n is number }}{{ true is true }}{{ false is false }}{{ 'a' in 'abc' }}{{ 'n' in x }}{{ x is string }}{{ 'a' is iterable }}{{ x is iterable }}", "FalseTrueTrueTrueTrueTrueTrueTrueTrueTrueTrueTrueFalseTrueTrue"),
    ("[{{ undefined_thing }}][{{ x.nope }}][{{ q|default('d') }}][{{ ''|default('d', true) }}]{% if q %}1{% else %}2{% endif %}", "[][][d][d]2"),
    ("{{ 'a' + 'b' }}{{ 'a' ~ 1 ~ none }}{{ 'ab' * 3 }}{{ 7 // 2 }}{{ 7 % 4 }}{{ 2 ** 3 }}{{ 7 / 2 }}{{ 1 + 1.5 }}", "aba1Noneababab3383.52.5"),
    ("{% macro f(a, b='z') %}<{{ a }}{{ b }}>{% endmacro %}{{ f(1) }}{{ f(1, b=2) }}", "<1z><12>"),
    ("{{ 'y' if x.n else 'n' }}{{ 'y' if q else 'n' }}{{ not q }}{{ 1 == 1.0 }}{{ 'a' != 'b' }}{{ 1 < 2 <= 2 }}", "ynTrueTrueTrueTrue"),
    ("{% set a, b = 1, 2 %}{{ a }}{{ b }}{% set c %}block {{ a }}{% endset %}{{ c }}", "12block 1"),
    ("{{ messages|selectattr('role','equalto','user')|list|length }}{{ messages|map(attribute='role')|join(',') }}{{ messages|rejectattr('role','equalto','user')|map(attribute='content')|first }}", "2user,assistant,useryo"),
    ("{% for m in messages %}{{ loop.index }}{{ loop.last }}{{ loop.length }}{{ loop.previtem.role if loop.previtem is defined }}{{ loop.nextitem.role if not loop.last }};{% else %}none{% endfor %}", "1False3assistant;2False3useruser;3True3assistant;"),
    ("{{ x|length }}{{ messages|last|tojson }}{{ '12'|int + 1 }}{{ 3|string ~ 'a' }}{{ 'abc'|upper|lower|title }}{{ 'a b'|replace(' ', '_') }}{{ '<'|safe }}{{ [3,1,2]|sort }}{{ [1,1,2]|unique|list }}{{ [1,2]|sum }}", "10{\"role\": \"user\", \"content\": \"bye\"}133aAbca_b<[1, 2, 3][1, 2]3"),
    ("{% for k, v in x|dictsort %}{{ k }},{% endfor %}{% for k, v in x|items %}{{ k }},{% endfor %}", "b,big,c,e,f,l,n,o,s,u,n,s,l,f,big,e,b,o,u,c,"),
    ("{{ 'a\nb'|indent(2) }}|{{ 'a\nb'|indent(2, true) }}|{{ ' x '|trim }}|{{ '%s-%d'|format('a', 3) }}", "a\n  b|  a\n  b|x|a-3"),
    ("{% filter upper %}abc{% endfilter %}{% raw %}{{ x }}{% endraw %}", "ABC{{ x }}"),
    ("{{ 'abc'|list }}{{ range(3)|list }}{{ [1,2,3]|reverse|list }}{{ 'abc'|reverse }}{{ [1,2,3][:2] }}", "['a', 'b', 'c'][0, 1, 2][3, 2, 1]cba[1, 2]"),
    ("{% if messages[0].role == 'user' and messages[1].role != 'user' or false %}ok{% endif %}{% if (messages[0]['role'] == 'user') != (0 % 2 == 0) %}bad{% endif %}", "ok"),
    ("{{ strftime_now('%d %b %Y') }}", "29 Feb 2024"),
    ("{{ bos_token }}|{{ eos_token }}|{{ add_generation_prompt }}|{{ tools is none }}|{{ documents is none }}", "<|begin|>|<|end|>|True|True|True"),
    ("{% for m in messages if m.role == 'user' %}{{ m.content }}{{ loop.index }}{% endfor %}", " hi 1bye2"),
    ("{%- for t in x.l %}{{ t }}{{ ', ' if not loop.last }}{%- endfor %}", "1, 2, 3"),
    ("{{ x.s }}|{{ x.s|tojson }}|{{ x.s|length }}", "é\"\\\n\t\u{7f}\u{2028}<>&'|\"é\\\"\\\\\\n\\t\u{7f}\u{2028}<>&'\"|11"),
    ("{{ 'a' 'b' }}{{ \"q\\\"uote\" }}{{ 'tab\\tnl\\n' }}", "abq\"uotetab\tnl\n"),
    ("{% set d = {'k': [1, {'z': none}]} %}{{ d.k[1].z is none }}{{ d['k'][0] }}{{ d }}", "True1{'k': [1, {'z': None}]}"),
    ("{{ 'é'.upper() }}{{ 'abc'.count('b') }}{{ 'a b'.isalpha() }}{{ '12'.isdigit() }}{{ ','.join(['a','b']) }}{{ 'a\nb'.splitlines() }}", "É1FalseTruea,b['a', 'b']"),
    ("{{ messages[0].content | length > 2 }}{{ [1,2] + [3] }}{{ 1 in [1,2] }}{{ x.l | join('-') }}{{ x.l|min }}{{ x.l|max }}", "True[1, 2, 3]True1-2-313"),
    ("{{ 'A' if messages|length == 3 }}{{ 'B' if messages|length == 9 }}", "A"),
    ("line1\n{{ 'v' }}\nline3\n", "line1\nv\nline3"),
    ("{% set t = messages[0]['content'] | trim + '!' %}{{ t }}", "hi!"),
    ("{{ namespace(a=1).a }}{{ dict(a=1) }}", "1{'a': 1}"),
    ("{{ x.n is integer }}{{ x.f is float }}{{ x.b is boolean }}{{ none is not none }}{{ 'x' is sameas 'x' }}{{ 3 is odd }}{{ 9 is divisibleby 3 }}", "TrueTrueTrueFalseTrueTrueTrue"),
    ("{{ {'a': {'b': 1}}.a.b }}{{ x['l'][0] }}{{ x.l[-1] }}", "113"),
    ("{%- if not tools is defined %}{%- set tools = none %}{%- endif %}{{ tools is none }}", "True"),
    ("{{ '' }}{{- '  x' -}}   {{ 'y' }}", "  xy"),
    ("{{ 'abc'[1] }}{{ 'abc'[5:] }}", "b"),
    ("{{ x.l | map('string') | join(',') }}{{ x.l | select('odd') | list }}{{ x.l|batch(2)|list }}", "1,2,3[1, 3][[1, 2], [3]]"),
    ("{{ x.get('n') }}{{ x.get('zz') }}{{ x.get('zz', 5) }}{% for k, v in x.o.items() %}{{ k }}={{ v }};{% endfor %}{{ x.keys()|list|length }}{{ x.values()|list|length }}", "5None5k=None;1010"),
    ("{{ x.big | tojson }} {{ x.e | tojson }} {{ x.n | tojson }} {{ 100000000000000000000000 | tojson }}", "1e+20 1.5e-07 5 100000000000000000000000"),
];
