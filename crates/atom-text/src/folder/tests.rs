use super::*;
use crate::TokenizerSource;
use crate::testing::{Draws, TempFolder, byte_tokenizer, byte_vocabulary};
use serde_json::json;

/// A `tokenizer.json` of the test vocabulary, in the present notation, with a BOS in its post-processor.
fn tokenizer_json() -> Value {
    let vocabulary = byte_vocabulary();
    let kind = |id: usize| vocabulary.token_types[id];
    let ids = 0..vocabulary.tokens.len();
    let vocab: serde_json::Map<String, Value> = ids
        .clone()
        .filter(|&id| kind(id) == 1)
        .map(|id| (vocabulary.tokens[id].clone(), json!(id)))
        .collect();
    let added: Vec<Value> = ids
        .filter(|&id| matches!(kind(id), 3 | 4))
        .map(|id| {
            json!({"id": id, "content": vocabulary.tokens[id], "single_word": false, "lstrip": false,
                "rstrip": false, "normalized": false, "special": kind(id) == 3})
        })
        .collect();
    let merges: Vec<Value> =
        vocabulary.merges.iter().map(|merge| json!(merge.split(' ').collect::<Vec<_>>())).collect();
    let begin = vocabulary.bos.unwrap();
    json!({
        "version": "1.0",
        "truncation": {"direction": "Right", "max_length": 4, "strategy": "LongestFirst", "stride": 0},
        "padding": {"strategy": {"Fixed": 64}, "direction": "Right", "pad_to_multiple_of": null,
            "pad_id": 0, "pad_type_id": 0, "pad_token": "!"},
        "added_tokens": added,
        "normalizer": null,
        "pre_tokenizer": {"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": true},
        "post_processor": {
            "type": "TemplateProcessing",
            "single": [{"SpecialToken": {"id": "<|begin|>", "type_id": 0}}, {"Sequence": {"id": "A", "type_id": 0}}],
            "pair": [{"Sequence": {"id": "A", "type_id": 0}}, {"Sequence": {"id": "B", "type_id": 1}}],
            "special_tokens": {"<|begin|>": {"id": "<|begin|>", "ids": [begin], "tokens": ["<|begin|>"]}},
        },
        "decoder": {"type": "ByteLevel", "add_prefix_space": true, "trim_offsets": true, "use_regex": true},
        "model": {"type": "BPE", "dropout": 0.5, "unk_token": null, "continuing_subword_prefix": "",
            "end_of_word_suffix": "", "fuse_unk": false, "byte_fallback": false, "ignore_merges": false,
            "vocab": vocab, "merges": merges},
    })
}

fn load(json: &Value, config: &Value) -> Result<Tokenizer, TextError> {
    let folder = TempFolder::new();
    folder.write("tokenizer.json", &json.to_string());
    folder.write("tokenizer_config.json", &config.to_string());
    Tokenizer::load(&TokenizerSource::Folder(folder.path().to_path_buf()))
}

#[test]
fn a_folder_and_a_gguf_file_of_one_vocabulary_encode_alike() {
    let (ours, reference) = (load(&tokenizer_json(), &json!({})).unwrap(), byte_tokenizer());
    let words = ["the ", "in", "g 12", "é", "日", "<|end|>", "<tag é>", " ", "\n", "'s", "🦀"];
    let mut draws = Draws::new(41);
    for _ in 0..500 {
        let text: String = (0..draws.below(40)).map(|_| words[draws.below(words.len())]).collect();
        let tokens = ours.encode(&text, false).unwrap();
        assert_eq!(tokens, reference.encode(&text, false).unwrap(), "{text:?}");
        assert_eq!(ours.decode(&tokens, true), reference.decode(&tokens, true));
    }
    // The pad of the GGUF vocabulary is its last id; a folder's vocabulary ends with its last token.
    assert_eq!((ours.vocab_size(), reference.vocab_size()), (268, 269));
}

#[test]
fn the_older_notation_of_merges_is_read_too() {
    let mut json = tokenizer_json();
    let mut merges: Vec<Value> = byte_vocabulary().merges.into_iter().map(Value::from).collect();
    merges.insert(0, json!("#version: 0.2"));
    json["model"]["merges"] = merges.into();
    json["model"].as_object_mut().unwrap().remove("type");
    let text = "the thing 12é";
    assert_eq!(
        load(&json, &json!({})).unwrap().encode(text, false).unwrap(),
        byte_tokenizer().encode(text, false).unwrap()
    );
}

#[test]
fn special_tokens_come_from_the_post_processor_and_the_config_overrules_it() {
    let around = |config: Value| {
        let tokenizer = load(&tokenizer_json(), &config).unwrap();
        let text = tokenizer.decode(&tokenizer.encode("a", true).unwrap(), false);
        assert_eq!(tokenizer.puts_bos(), tokenizer.bos().is_some() && text.starts_with("<|begin|>"));
        text
    };
    let named = |add_bos: Option<bool>, add_eos: Option<bool>| {
        json!({"bos_token": "<|begin|>", "eos_token": {"content": "<|end|>", "lstrip": false},
            "add_bos_token": add_bos, "add_eos_token": add_eos})
    };
    assert_eq!(around(json!({})), "<|begin|>a");
    assert_eq!(around(named(None, None)), "<|begin|>a");
    assert_eq!(around(named(Some(true), Some(true))), "<|begin|>a<|end|>");
    assert_eq!(around(named(Some(false), Some(false))), "a");

    let mut bare = tokenizer_json();
    bare["post_processor"] = Value::Null;
    let tokenizer = load(&bare, &named(Some(true), None)).unwrap();
    assert_eq!(tokenizer.decode(&tokenizer.encode("a", true).unwrap(), false), "<|begin|>a");
    let error = load(&bare, &json!({"add_bos_token": true})).unwrap_err().to_string();
    assert!(error.contains("add_bos_token: true and does not name"), "{error}");
}

#[test]
fn special_tokens_are_named_by_the_config_or_the_older_map() {
    let folder = TempFolder::new();
    folder.write("tokenizer.json", &tokenizer_json().to_string());
    folder.write("tokenizer_config.json", r#"{"bos_token": null, "eos_token": {"content": "<|end|>"}}"#);
    folder.write("special_tokens_map.json", r#"{"bos_token": "<|begin|>", "eos_token": "other"}"#);
    let tokenizer = Tokenizer::load(&TokenizerSource::Folder(folder.path().to_path_buf())).unwrap();
    let reference = byte_vocabulary();
    assert_eq!((tokenizer.bos(), tokenizer.eos()), (reference.bos, reference.eos));
    assert_eq!(tokenizer.end_tokens(), [reference.eos.unwrap()]);
    let texts: Vec<_> = tokenizer.special_texts().collect();
    assert_eq!(texts, [("bos_token", "<|begin|>"), ("eos_token", "<|end|>")]);
}

#[test]
fn added_tokens_keep_their_ids_over_gaps() {
    let mut json = tokenizer_json();
    json["added_tokens"]
        .as_array_mut()
        .unwrap()
        .push(json!({"id": 300, "content": "<far>", "single_word": false,
        "lstrip": false, "rstrip": false, "normalized": false, "special": false}));
    let tokenizer = load(&json, &json!({})).unwrap();
    assert_eq!(tokenizer.encode("a<far>", false).unwrap(), [97, 300]);
    assert_eq!((tokenizer.vocab_size(), tokenizer.token_bytes(299)), (301, None));
}

#[test]
fn other_kinds_of_tokenizer_are_refused_by_name() {
    let refused = |change: fn(&mut Value)| {
        let mut json = tokenizer_json();
        change(&mut json);
        load(&json, &json!({})).unwrap_err().to_string()
    };
    let unigram =
        refused(|json| json["model"] = json!({"type": "Unigram", "vocab": [["a", -1.0]], "unk_id": 0}));
    assert!(unigram.contains("model \"Unigram\"") && unigram.contains("BPE"), "{unigram}");
    let none = refused(|json| json["decoder"] = Value::Null);
    assert!(none.contains("decoder \"none\"") && none.contains("ByteLevel"), "{none}");
    let sentencepiece = refused(|json| {
        json["decoder"] =
            json!({"type": "Sequence", "decoders": [{"type": "Replace"}, {"type": "ByteFallback"}]});
    });
    assert!(sentencepiece.contains("Replace + ByteFallback"), "{sentencepiece}");
}

#[test]
fn damaged_files_are_refused_with_the_reason() {
    type Damage = fn(&mut Value);
    let cases: &[(Damage, &str)] = &[
        (
            |json| json["added_tokens"][0]["content"] = json!("the"),
            "\"the\" has id 265, and the vocabulary gives it 257",
        ),
        (|json| json["added_tokens"][0]["id"] = json!("x"), "tokenizer.json"),
        (|json| json["model"]["vocab"]["far"] = json!(4_000_000_000u32), "largest id is 4000000000"),
        (|json| json["model"]["vocab"] = json!({}), "out of vocabulary"),
        (|json| json["model"]["merges"] = json!([["a", "z"]]), "az"),
        (|json| json["model"]["merges"] = json!(["a b c"]), "merge 0"),
        (|json| json["model"]["merges"] = json!([["<|begin|>", "<|begin|>"]]), "longer than any"),
        (|json| json["model"]["merges"] = json!([7]), "expected a merge"),
        (|json| json["model"]["merges"] = json!([["a"]]), "invalid length 1, expected a merge"),
        (|json| json["model"]["merges"] = json!([["a", "b", "c"]]), "invalid length 3, expected a merge"),
        (
            |json| {
                json["pre_tokenizer"] = json!({"type": "Split", "pattern": {"Regex": "("}, "behavior": "Isolated",
            "invert": false})
            },
            "tokenizer.json",
        ),
        (|json| json["post_processor"] = json!({"type": "Mystery"}), "tokenizer.json"),
    ];
    for (damage, hint) in cases {
        let mut json = tokenizer_json();
        damage(&mut json);
        let error = load(&json, &json!({})).unwrap_err().to_string();
        assert!(error.contains(hint), "{hint}: {error}");
    }
}

#[test]
fn missing_and_unreadable_files_are_named() {
    let folder = TempFolder::new();
    let source = TokenizerSource::Folder(folder.path().to_path_buf());
    let error = Tokenizer::load(&source).unwrap_err();
    assert!(matches!(&error, TextError::NoTokenizer { folder: named } if named == folder.path()), "{error}");
    folder.write("tokenizer.json", "{\"model\": ");
    let error = Tokenizer::load(&source).unwrap_err().to_string();
    assert!(error.contains("tokenizer.json") && error.contains("line 1"), "{error}");
    folder.write("tokenizer.json", &tokenizer_json().to_string());
    folder.write("tokenizer_config.json", "no JSON");
    let error = Tokenizer::load(&source).unwrap_err().to_string();
    assert!(error.contains("tokenizer_config.json"), "{error}");
}
