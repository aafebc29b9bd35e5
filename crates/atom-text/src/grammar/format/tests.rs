//! What formats of formats allow, and which are refused.

use super::super::tests::{allowed, refusal, vocabulary};
use super::*;
use crate::GrammarSource;
use crate::testing::byte_tokenizer;
use serde_json::json;

fn at(kind: FormatKind) -> Format {
    Format { place: "format".into(), kind }
}

fn text(text: &str) -> Format {
    at(FormatKind::ConstString(text.into()))
}

fn regex(regex: &str) -> Format {
    at(FormatKind::Regex(regex.into()))
}

fn any() -> Format {
    at(FormatKind::AnyText { excludes: Vec::new(), chars_max: None })
}

fn schema(schema: Value) -> Format {
    at(FormatKind::JsonSchema(schema))
}

fn ebnf(grammar: &str) -> Format {
    at(FormatKind::Grammar(grammar.into()))
}

fn sequence(parts: &[Format]) -> Format {
    at(FormatKind::Sequence(parts.to_vec()))
}

fn or(parts: &[Format]) -> Format {
    at(FormatKind::Or(parts.to_vec()))
}

fn repeat(least: u32, most: Option<u32>, content: Format) -> Format {
    at(FormatKind::Repeat { least, most, content: Box::new(content) })
}

fn a_tag(begin: &str, content: Format, end: &str) -> Tag {
    Tag { begin: begin.into(), content: Box::new(content), ends: vec![end.into()] }
}

fn tag(begin: &str, content: Format, end: &str) -> Format {
    at(FormatKind::Tag(a_tag(begin, content, end)))
}

fn count(at_least_one: bool, stop_after_first: bool) -> TagCount {
    TagCount { at_least_one, stop_after_first }
}

fn triggered(triggers: &[&str], tags: Vec<Tag>, excludes: &[&str], count: TagCount) -> Format {
    let texts = |texts: &[&str]| texts.iter().map(ToString::to_string).collect();
    at(FormatKind::TriggeredTags { triggers: texts(triggers), tags, excludes: texts(excludes), count })
}

fn separated(tags: Vec<Tag>, separator: &str, count: TagCount) -> Format {
    at(FormatKind::TagsWithSeparator { tags, separator: separator.into(), count })
}

#[track_caller]
fn check(format: &Format, fits: &[&str], breaks: &[&str]) {
    let tokenizer = byte_tokenizer();
    let grammar = vocabulary(&tokenizer).compile(&GrammarSource::Format(format.clone()));
    let grammar = grammar.unwrap_or_else(|error| panic!("{error}: {format:?}: {:?}", format.lark()));
    let follows = |text: &str| {
        let mut constraint = grammar.start();
        for byte in text.bytes() {
            if !allowed(&mut constraint, tokenizer.vocab_size()).contains(&byte.into()) {
                return false;
            }
            constraint.advance(byte.into()).unwrap();
        }
        constraint.is_complete().unwrap()
    };
    for text in fits {
        assert!(follows(text), "{text:?} follows {}", format.lark().unwrap());
    }
    for text in breaks {
        assert!(!follows(text), "{text:?} does not follow {}", format.lark().unwrap());
    }
}

fn one() -> Value {
    json!({"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"], "additionalProperties": false})
}

#[test]
fn each_format_is_what_it_says() {
    check(&text("a\"\\\n"), &["a\"\\\n"], &["", "a"]);
    check(&regex("^[a-z]{2}/$"), &["ab/"], &["ab", "abc/"]);
    check(&schema(one()), &["{\"a\": 1}"], &["{}", "{\"a\": 1} "]);
    check(&ebnf("root ::= \"(\" root? \")\""), &["()", "(())"], &["", "(()"]);
    check(&any(), &["", "any\n<x>"], &[]);
    let some = FormatKind::AnyText { excludes: vec!["no".into(), "<".into()], chars_max: Some(5) };
    check(&at(some), &["", "n o", "ééééé"], &["nono", "a<", "abcdef"]);
    check(&sequence(&[text("Answer: "), schema(one())]), &["Answer: {\"a\":2}"], &["Answer: ", "{\"a\":2}"]);
    check(
        &or(&[text("yes"), text("ye"), schema(one())]),
        &["yes", "ye", "{\"a\":2}"],
        &["y", "yes{\"a\":2}"],
    );
    check(&repeat(1, None, text("ab")), &["ab", "abab"], &["", "aba"]);
    check(&repeat(0, Some(2), schema(one())), &["", "{\"a\":1}{\"a\":2}"], &["{\"a\":1}{\"a\":1}{\"a\":1}"]);
    check(
        &sequence(&[repeat(0, Some(1), text("x")), text("y"), repeat(0, Some(0), text("z"))]),
        &["xy", "y"],
        &["x", "yz"],
    );
    let ends = Tag { ends: vec!["</a>".into(), "</b>".into()], ..a_tag("<t>", schema(one()), "") };
    check(
        &at(FormatKind::Tag(ends)),
        &["<t>{\"a\":1}</a>", "<t>{\"a\":1}</b>"],
        &["<t>{\"a\":1}", "<t>{\"a\":1}</a></b>"],
    );
}

/// Text that a greedy parser would swallow the end of.
#[test]
fn text_between_texts_ends_where_its_end_is() {
    let thought = tag("<think>", any(), "</think>");
    check(
        &thought,
        &["<think></think>", "<think>a < b</think>"],
        &["<think>", "<think></think>a", "<think></think></think>"],
    );
    check(
        &sequence(&[thought, schema(one())]),
        &["<think>{\"a\":1}</think>{\"a\":2}"],
        &["<think>{\"a\":1}"],
    );
    check(&sequence(&[regex("[a-z]+"), text("end")]), &["aend", "endend"], &["end", "a"]);
    check(&sequence(&[regex("[a-z]+"), schema(one())]), &["ab{\"a\":1}"], &["{\"a\":1}", "ab"]);
    check(&tag("<g>", ebnf("root ::= [a-z]+"), "end"), &["<g>aend", "<g>endend"], &["<g>end"]);
    check(
        &tag("<g>", sequence(&[ebnf("root ::= \"(\" root \")\" | [0-9]+"), text("1")]), "2"),
        &["<g>(1)12", "<g>1212"],
        &["<g>12"],
    );
}

#[test]
fn tags_behind_triggers_are_any_number_at_least_one_or_at_most_one() {
    let tags =
        || vec![a_tag("<f=a>", schema(one()), "</f>"), a_tag("<f=b>", or(&[text("x"), text("y")]), "</f>")];
    let with = |count| triggered(&["<f="], tags(), &["!"], count);
    let (a, b) = ("<f=a>{\"a\":1}</f>", "<f=b>x</f>");
    let both = format!("say {a} <f {b}.");
    let no = ["<f=", "<f=c>", "<f=b>z</f>", "oh!", "<f=b>x", "<f=b>x</f>!"];
    check(&with(count(false, false)), &["", "text <f", a, &both], &no);
    check(&with(count(true, false)), &[a, &format!("{b} then {a}")], &["", "text", &both, "<f=b>x</f>!"]);
    check(&with(count(false, true)), &["", "text", &format!("say {b}")], &[&both, &format!("{b} "), "!"]);
    check(&with(count(true, true)), &[a, b], &["", &format!("{a}{b}"), &format!(" {a}")]);
    // Two triggers, of which one ends as the other.
    let two = triggered(
        &["<f", "[f"],
        vec![a_tag("<f>", text("1"), "."), a_tag("[f]", schema(one()), ".")],
        &[],
        count(false, false),
    );
    check(&two, &["a<f>1.b[f]{\"a\":1}.", "<[f]{\"a\":1}."], &["<f]1.", "[f>"]);
    // Within a tag free text ends where the tag does.
    let within = tag("<r>", with(count(false, false)), "</r>");
    check(&within, &["<r></r>", &format!("<r>say {both}</r>")], &["<r>", "<r></r>x", "<r>a</r></r>"]);
    check(&sequence(&[within, schema(one())]), &[&format!("<r>{a}</r>{{\"a\":3}}")], &["<r></r>"]);
}

#[test]
fn tags_with_a_separator_are_those_and_nothing_else() {
    let tags = || vec![a_tag("<a>", schema(one()), "</a>"), a_tag("<b>", any(), "</b>")];
    let (a, b) = ("<a>{\"a\":1}</a>", "<b>hi, you</b>");
    let list = format!("{a},{b},{a}");
    check(
        &separated(tags(), ",", count(false, false)),
        &["", a, b, &list],
        &[",", &format!("{a},"), &format!("{a}{b}"), " "],
    );
    check(&separated(tags(), ",", count(true, false)), &[a, &list], &[""]);
    check(&separated(tags(), ",", count(false, true)), &["", a], &[&list]);
    check(&separated(tags(), "", count(true, false)), &[&format!("{a}{b}{a}")], &["", &format!("{a},{b}")]);
}

#[test]
fn what_a_parser_would_not_find_the_end_of_is_refused_by_place() {
    let number = || schema(json!({"type": "integer"}));
    let placed = |place: &str, format: Format| Format { place: place.into(), ..format };
    for (format, expected) in [
        (sequence(&[placed("first", any()), schema(one())]), "first: it can't be told where this ends"),
        (sequence(&[placed("first", regex("[a-z{]+")), schema(one())]), "first"),
        (or(&[placed("one", regex("\\{.*")), schema(one())]), "can't be told from"),
        (
            or(&[placed("one", ebnf("root ::= \"a\"")), schema(one())]),
            "one: a grammar can't be one of several",
        ),
        (sequence(&[placed("one", ebnf("root ::= \"a\"")), schema(one())]), "one: where a grammar ends"),
        (repeat(0, None, placed("one", ebnf("root ::= \"a\""))), "one: where a grammar ends"),
        (sequence(&[placed("n", number()), text("5")]), "n: it can't be told where a number ends"),
        (or(&[sequence(&[text("<a>"), schema(one())]), placed("b", text("<a>{x"))]), "b: it can't be told"),
        (
            triggered(&["<f="], vec![a_tag("<g>", any(), "")], &[], count(false, false)),
            "format.tags[0].begin",
        ),
        (
            triggered(&["<f", "<g"], vec![a_tag("<f>", any(), "x")], &[], count(false, false)),
            "format.triggers[1]",
        ),
        (
            triggered(&["<f"], vec![a_tag("<f>", any(), "x")], &["<"], count(false, false)),
            "the trigger \"<f\" holds",
        ),
        (schema(json!({"not": {}})), "not"),
        (schema(json!({"$ref": "#"})), "format.json_schema: no finite"),
        (regex("("), "format.pattern"),
        (ebnf("root ::= b"), "format.grammar: line 1"),
    ] {
        let words = refusal(&GrammarSource::Format(format.clone()));
        assert!(words.contains(expected) && words.len() < 1000, "{expected}: {words}: {:?}", format.lark());
    }
    // What differs in time may begin alike.
    check(&sequence(&[number(), text(" 5")]), &["12 5"], &["12"]);
    check(
        &or(&[sequence(&[text("<a>"), schema(one())]), text("<a>[x")]),
        &["<a>[x", "<a>{\"a\":1}"],
        &["<a>"],
    );
}
