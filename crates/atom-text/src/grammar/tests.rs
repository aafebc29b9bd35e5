use super::vocabulary::{COMPILE_TIME_MAX, CompileLimits};
use super::*;
use crate::Tokenizer;
use crate::testing::{Draws, byte_tokenizer, byte_vocabulary};
use serde_json::{Value, json};
use std::time::Duration;

pub(super) fn vocabulary(tokenizer: &Tokenizer) -> GrammarVocabulary {
    GrammarVocabulary::new(tokenizer, &[]).unwrap()
}

fn compile(source: &GrammarSource) -> Result<Grammar, crate::TextError> {
    vocabulary(&byte_tokenizer()).compile(source)
}

pub(super) fn refusal(source: &GrammarSource) -> String {
    let error = compile(source).expect_err(&format!("{source:.100?} was accepted"));
    assert!(error.is_clients_fault(), "{error}");
    error.to_string()
}

pub(super) fn allowed(constraint: &mut Constraint, vocab: usize) -> Vec<TokenId> {
    let mut words = vec![u32::MAX; vocab.div_ceil(32) + 1];
    constraint.mask(&mut words).unwrap();
    let set: Vec<_> =
        (0..words.len() as u32 * 32).filter(|&t| words[t as usize / 32] >> (t % 32) & 1 == 1).collect();
    assert!(set.iter().all(|&token| (token as usize) < vocab), "tokens that do not exist: {set:?}");
    set
}

/// Writes a text at random, token by token, as the masks allow; prefers what brings a document to its end.
fn walk(tokenizer: &Tokenizer, grammar: &Grammar, draws: &mut Draws) -> Option<String> {
    let (mut constraint, mut tokens) = (grammar.start(), Vec::new());
    let closing = ["\"", "}", "]", ",", ":", "0"].map(|text| tokenizer.id_of(text).unwrap());
    for _ in 0..2_000 {
        let set = allowed(&mut constraint, tokenizer.vocab_size());
        assert!(set.iter().all(|&t| tokenizer.token_bytes(t).is_some()), "an id without a token is allowed");
        let end = set.iter().copied().find(|t| tokenizer.end_tokens().contains(t));
        assert_eq!(
            end.is_some(),
            constraint.is_complete().unwrap(),
            "the end is allowed where it is complete"
        );
        if let Some(end) = end
            && (set.len() == 1 || draws.below(3) == 0)
        {
            constraint.advance(end).unwrap();
            // Whatever comes behind the end can only be the end again.
            assert!(allowed(&mut constraint, tokenizer.vocab_size()).contains(&end));
            return Some(tokenizer.decode(&tokens, false));
        }
        let others: Vec<_> = set.into_iter().filter(|t| Some(*t) != end).collect();
        let hurry = tokens.len() > 30 || draws.below(2) == 0;
        let token = closing.iter().copied().find(|t| hurry && others.contains(t));
        let token = token.unwrap_or_else(|| others[draws.below(others.len())]);
        constraint.advance(token).unwrap();
        tokens.push(token);
    }
    None
}

fn walks(source: &GrammarSource, count: usize, check: impl Fn(&str)) {
    let tokenizer = byte_tokenizer();
    let grammar = vocabulary(&tokenizer).compile(source).unwrap();
    let mut draws = Draws::new(7);
    let mut ended = 0;
    for _ in 0..count {
        if let Some(text) = walk(&tokenizer, &grammar, &mut draws) {
            check(&text);
            ended += 1;
        }
    }
    assert!(ended > 0, "{source:?}: no walk came to its end");
}

/// True if a schema of the kinds below describes the value: written apart from what it checks.
fn validates(root: &Value, schema: &Value, value: &Value) -> bool {
    let Some(schema) = schema.as_object() else { return schema == &json!(true) };
    let number = |key: &str| schema.get(key).and_then(Value::as_f64);
    let within = |n: f64, least: &str, most: &str| {
        number(least).is_none_or(|least| n >= least) && number(most).is_none_or(|most| n <= most)
    };
    schema.iter().all(|(key, wanted)| match key.as_str() {
        "$ref" => validates(root, root.pointer(&wanted.as_str().unwrap()[1..]).unwrap(), value),
        "type" => match wanted.as_str().unwrap() {
            "object" => value.is_object(),
            "array" => value.is_array(),
            "string" => value.is_string(),
            "integer" => value.as_f64().is_some_and(|n| n.fract() == 0.0),
            "number" => value.is_number(),
            "boolean" => value.is_boolean(),
            "null" => value.is_null(),
            other => panic!("{other}"),
        },
        "enum" => wanted.as_array().unwrap().contains(value),
        "const" => wanted == value,
        "anyOf" => wanted.as_array().unwrap().iter().any(|option| validates(root, option, value)),
        "oneOf" => {
            wanted.as_array().unwrap().iter().filter(|option| validates(root, option, value)).count() == 1
        }
        "required" => {
            wanted.as_array().unwrap().iter().all(|name| value.get(name.as_str().unwrap()).is_some())
        }
        "properties" => value.as_object().unwrap().iter().all(|(name, member)| match wanted.get(name) {
            Some(schema) => validates(root, schema, member),
            None => schema.get("additionalProperties") != Some(&json!(false)),
        }),
        "items" => value.as_array().unwrap().iter().all(|item| validates(root, wanted, item)),
        "minItems" | "maxItems" => within(value.as_array().unwrap().len() as f64, "minItems", "maxItems"),
        "minimum" | "maximum" => within(value.as_f64().unwrap(), "minimum", "maximum"),
        "minLength" | "maxLength" => {
            within(value.as_str().unwrap().chars().count() as f64, "minLength", "maxLength")
        }
        "$defs" | "additionalProperties" | "title" | "description" => true,
        other => panic!("{other} is not checked"),
    })
}

#[test]
fn whatever_is_written_within_the_masks_of_a_schema_is_json_that_the_schema_describes() {
    for schema in [
        json!({"type": "object", "properties": {"name": {"type": "string", "maxLength": 12}, "age":
            {"type": "integer", "minimum": 0, "maximum": 130}}, "required": ["name", "age"],
            "additionalProperties": false}),
        json!({"type": "array", "items": {"enum": ["a", "é", 3, null, true]}, "minItems": 1, "maxItems": 4}),
        json!({"anyOf": [{"type": "boolean"}, {"type": "object", "properties": {"x": {"type": "number"}},
            "required": ["x"], "additionalProperties": false}]}),
        // A tree: recursion that writes something is fine.
        json!({"$ref": "#/$defs/node", "$defs": {"node": {"type": "object", "properties": {"v":
            {"const": 1}, "children": {"type": "array", "items": {"$ref": "#/$defs/node"}, "maxItems": 2}},
            "required": ["v"], "additionalProperties": false}}}),
        // Options that exclude each other.
        json!({"oneOf": [{"type": "object", "properties": {"k": {"const": "a"}, "x": {"type": "null"}}, "required":
            ["k", "x"], "additionalProperties": false}, {"type": "object", "properties": {"k": {"const": "b"}},
            "required": ["k"], "additionalProperties": false}]}),
        json!({"type": "string", "minLength": 2, "maxLength": 5, "title": "t", "description": "d"}),
        json!(true),
    ] {
        walks(&GrammarSource::JsonSchema(schema.clone()), 20, |text| {
            let value: Value = serde_json::from_str(text).unwrap_or_else(|e| panic!("{e}: {text:?}"));
            assert!(validates(&schema, &schema, &value), "{schema}: {text}");
        });
    }
    walks(&GrammarSource::JsonObject, 20, |text| {
        assert!(serde_json::from_str::<Value>(text).unwrap().is_object(), "{text:?}");
    });
}

#[test]
fn regular_expressions_choices_and_grammars_are_followed() {
    let is_date = |text: &str| {
        let parts: Vec<_> = text.split('-').collect();
        assert!(parts.len() == 2 && parts.iter().all(|part| part.len() == 2), "{text:?}");
        assert!(text.bytes().all(|byte| byte == b'-' || byte.is_ascii_digit()), "{text:?}");
    };
    for regex in ["[0-9]{2}-[0-9]{2}", "^[0-9]{2}-[0-9]{2}$"] {
        walks(&GrammarSource::Regex(regex.into()), 20, is_date);
    }
    walks(&GrammarSource::Regex(r"x/y\$".into()), 3, |text| assert_eq!(text, "x/y$"));
    let choices = ["yes", "ye", "日本", "with \"quotes\" and \\", "🦀\n", "\u{7f}", "<|end|>"]
        .map(String::from)
        .to_vec();
    walks(&GrammarSource::Choice(choices.clone()), 40, |text| assert!(choices.iter().any(|c| c == text)));
    let lark = "start: \"(\" start* \")\"";
    walks(&GrammarSource::Lark(lark.into()), 20, |text| {
        let mut depth = 0i32;
        for (at, c) in text.char_indices() {
            depth += if c == '(' { 1 } else { -1 };
            assert_eq!(depth == 0, at + 1 == text.len(), "{text:?}");
        }
    });
}

#[test]
fn a_character_may_be_cut_into_tokens_and_its_rest_must_follow() {
    let tokenizer = byte_tokenizer();
    let grammar = vocabulary(&tokenizer).compile(&GrammarSource::Regex("[é日]".into())).unwrap();
    let mut constraint = grammar.start();
    let id = |byte: u8| TokenId::from(byte);
    let set = allowed(&mut constraint, tokenizer.vocab_size());
    let whole = tokenizer.encode("é", false).unwrap();
    assert_eq!(whole.len(), 1, "the vocabulary has a token of both bytes");
    assert!(set == [id(0xc3), id(0xe6), whole[0]] || set.len() == 3, "{set:?}");
    assert!([id(0xc3), id(0xe6), whole[0]].iter().all(|token| set.contains(token)), "{set:?}");
    for byte in "日".bytes() {
        assert!(allowed(&mut constraint, tokenizer.vocab_size()).contains(&id(byte)));
        constraint.advance(id(byte)).unwrap();
    }
    assert!(constraint.is_complete().unwrap());
    assert_eq!(allowed(&mut constraint, tokenizer.vocab_size()), tokenizer.end_tokens());
}

#[test]
fn tags_are_free_text_until_a_trigger_and_then_their_schema() {
    let tag = |name: &str, schema: Value| StructuralTag {
        begin: format!("<f={name}>"),
        schema,
        end: "</f>".into(),
    };
    let tags = vec![tag("a", json!({"const": 1})), tag("b", json!({"enum": ["x", "y"]}))];
    let source =
        GrammarSource::StructuralTags(StructuralTags { triggers: vec!["<f=".into()], tags: tags.clone() });
    let tokenizer = byte_tokenizer();
    let grammar = vocabulary(&tokenizer).compile(&source).unwrap();
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
    for text in
        ["", "just text <f ok", "<f=a>1</f>", "é <f=b>\"x\"</f>\n<f=a>1</f> bye", "<f=a>1</f><f=b>\"y\"</f>"]
    {
        assert!(follows(text), "{text:?}");
    }
    for text in ["<f=", "<f=c>1</f>", "<f=a>2</f>", "<f=b>\"x\"</g>", "<f=a>1"] {
        assert!(!follows(text), "{text:?}");
    }
    let with = |triggers: &[&str]| {
        let triggers = triggers.iter().map(ToString::to_string).collect();
        refusal(&GrammarSource::StructuralTags(StructuralTags { triggers, tags: tags.clone() }))
    };
    assert!(with(&["<g="]).contains("structures[0].begin"), "{}", with(&["<g="]));
    assert!(with(&["<f=", "<f"]).contains("exactly one"), "{}", with(&["<f=", "<f"]));
    assert!(with(&["<f=", "z"]).contains("triggers[1]"), "{}", with(&["<f=", "z"]));
}

#[test]
fn continuations_of_one_grammar_do_not_touch_each_other() {
    let tokenizer = byte_tokenizer();
    let grammar = vocabulary(&tokenizer).compile(&GrammarSource::Regex("ab|cd".into())).unwrap();
    let (mut one, mut two) = (grammar.start(), grammar.start());
    one.advance(b'a'.into()).unwrap();
    assert_eq!(allowed(&mut one, tokenizer.vocab_size()), [u32::from(b'b')]);
    assert_eq!(allowed(&mut two, tokenizer.vocab_size()), [u32::from(b'a'), u32::from(b'c')]);
    assert!(one.advance(b'z'.into()).is_err(), "what was not allowed can't be taken in");
    assert!(one.mask(&mut [0; 16]).is_err(), "and ends this one");
    two.advance(b'c'.into()).unwrap();
    assert_eq!(allowed(&mut two, tokenizer.vocab_size()), [u32::from(b'd')]);
}

#[test]
fn what_is_malformed_allows_nothing_or_explodes_is_refused_with_the_reason() {
    let schema = |value: Value| GrammarSource::JsonSchema(value);
    let lark = |text: &str| GrammarSource::Lark(text.to_owned());
    let nested = |depth: usize| {
        (0..depth).fold(
            json!({"type": "null"}),
            |inner, _| json!({"type": "object", "properties": {"a": inner}, "required": ["a"]}),
        )
    };
    for (source, expected) in [
        (schema(json!([])), "a schema is an object"),
        (schema(json!({"type": "nonsense"})), "nonsense"),
        (schema(json!({"not": {}})), "not"),
        (schema(json!({"oneOf": [{"type": "integer"}, {"minimum": 5}]})), "oneOf"),
        (schema(json!({"x-guidance": {"lenient": true}})), "x-guidance"),
        (schema(json!({"type": "string", "format": "no-such-format"})), "no-such-format"),
        (schema(json!({"type": "integer", "minimum": 5, "maximum": 3})), ""),
        // Recursion that writes nothing, and references to nowhere or to other machines.
        (schema(json!({"$ref": "#"})), "refers back"),
        (schema(json!({"anyOf": [{"$ref": "#"}]})), "refers back"),
        (
            schema(
                json!({"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}}),
            ),
            "",
        ),
        (schema(json!({"type": "object", "properties": {"a": {"$ref": "#"}}, "required": ["a"]})), ""),
        (schema(json!({"$ref": "#/$defs/none"})), "none"),
        (schema(json!({"$ref": "http://localhost/x.json"})), "localhost"),
        (schema(nested(300)), "deep"),
        (GrammarSource::Regex("(".into()), ""),
        (GrammarSource::Regex("x".repeat(300_000)), "262144"),
        (GrammarSource::Choice(vec![]), "nothing to choose"),
        (lark(" "), "empty"),
        (lark("start: nothing"), "nothing"),
        (lark("start: start"), "can continue"),
        (lark(&format!("start: {}\"a\"{}", "(".repeat(500), ")".repeat(500))), "deep"),
        (lark("start: <|no_such_token|>"), "no_such_token"),
        (
            lark(&(0..40).fold("start: A40\nA0: /[ab]*a[ab]{300}/\n".to_owned(), |text, i| {
                text + &format!("A{}: A{i} A{i}\n", i + 1)
            })),
            "",
        ),
    ] {
        let text = refusal(&source);
        assert!(text.contains(expected) && text.len() < 1000, "{source:.100?}: {text}");
    }
}

/// As many rules as fit into a source, each named by the one before: what is followed by recursion.
#[test]
fn a_long_chain_of_rules_or_references_is_no_stack_overflow() {
    let count = 15_000;
    let rules: String = (0..count).map(|i| format!("a{i}: a{}\n", i + 1)).collect();
    let lark = GrammarSource::Lark(format!("start: a0\n{rules}a{count}: \"x\"\n"));
    walks(&lark, 1, |text| assert_eq!(text, "x"));
    let count = 5_000;
    let link = |i: usize| (format!("d{i}"), json!({"$ref": format!("#/$defs/d{}", i + 1)}));
    let mut links: serde_json::Map<String, Value> = (0..count).map(link).collect();
    links.insert(format!("d{count}"), json!({"type": "null"}));
    let schema = GrammarSource::JsonSchema(json!({"$ref": "#/$defs/d0", "$defs": links}));
    match compile(&schema) {
        Ok(_) => walks(&schema, 1, |text| assert_eq!(text, "null")),
        Err(error) => assert!(error.is_clients_fault(), "{error}"),
    }
}

#[test]
fn compiling_is_bounded_in_time_and_in_number() {
    let mut vocabulary = vocabulary(&byte_tokenizer());
    let source = GrammarSource::Regex("a+".into());
    vocabulary.limit(CompileLimits { time: COMPILE_TIME_MAX, at_once: 0 });
    let error = vocabulary.compile(&source).unwrap_err();
    assert!(matches!(error, crate::TextError::GrammarBusy { running: 0, max: 0 }), "{error}");
    assert!(!error.is_clients_fault());
    vocabulary.limit(CompileLimits { time: Duration::ZERO, at_once: 1_000 });
    // Most often nothing is there after no time at all; what is there in time is fine.
    let errors = (0..200).filter_map(|_| vocabulary.compile(&source).err()).map(|error| error.to_string());
    let errors: Vec<_> = errors.collect();
    assert!(!errors.is_empty() && errors.iter().all(|text| text.contains("more than 0ns")), "{errors:?}");
    vocabulary.limit(CompileLimits { time: COMPILE_TIME_MAX, at_once: 1_000 });
    assert!(vocabulary.compile(&source).is_ok());
}

/// A checkpoint may end its turns with a token that its tokenizer doesn't call an end.
#[test]
fn a_complete_text_may_end_with_any_end_token_of_the_checkpoint() {
    let tokenizer = byte_tokenizer();
    let turn = tokenizer.id_of("<|begin|>").unwrap();
    let beyond = tokenizer.vocab_size() as TokenId + 5;
    let vocabulary = GrammarVocabulary::new(&tokenizer, &[turn, beyond]).unwrap();
    let grammar = vocabulary.compile(&GrammarSource::Choice(vec!["a".into()])).unwrap();
    let mut constraint = grammar.start();
    constraint.advance(TokenId::from(b'a')).unwrap();
    let mut ends = tokenizer.end_tokens().to_vec();
    ends.push(turn);
    ends.sort_unstable();
    assert_eq!(allowed(&mut constraint, tokenizer.vocab_size()), ends);
}

mod allowance;
mod answers;
