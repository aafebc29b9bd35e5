use super::*;
use crate::testing::byte_vocabulary;
use tokenizers::{OffsetReferential, OffsetType, PreTokenizedString, PreTokenizer};

/// The pieces that a cut makes, as slices of the text.
fn pieces<'a>(pre: &str, text: &'a str) -> Vec<&'a str> {
    let cut = CUTS.iter().find(|cut| cut.names.contains(&pre)).unwrap();
    let mut pieces = PreTokenizedString::from(text);
    pre_tokenizer(cut.steps).unwrap().pre_tokenize(&mut pieces).unwrap();
    let splits = pieces.get_splits(OffsetReferential::Original, OffsetType::Byte);
    splits.into_iter().map(|(_, (start, end), _)| &text[start..end]).collect()
}

#[test]
fn each_family_cuts_text_its_own_way() {
    let cases: &[(&str, &str, &[&str])] = &[
        ("smollm", "in 2024 ½٣x", &["in", " ", "2", "0", "2", "4", " ", "½", "٣", "x"]),
        ("smollm", "I'll  go\n\n now", &["I", "'ll", " ", " go", "\n\n", " now"]),
        ("gpt-2", "in 2024½ x", &["in", " 2024½", " x"]),
        ("gpt-2", "don't DON'T!?\n", &["don", "'t", " DON", "'", "T", "!?", "\n"]),
        ("llama-bpe", "in 12345 DON'T", &["in", " ", "123", "45", " DON", "'T"]),
        ("llama3", "a.\n\n\tb  c ", &["a", ".\n\n", "\tb", " ", " c", " "]),
        ("qwen2", "in 123 DON'T", &["in", " ", "1", "2", "3", " DON", "'T"]),
        ("qwen2", "(x) \r\n y", &["(x", ")", " \r\n", " y"]),
        ("default", "a $5.00 12345x", &["a", " ", "$", "5", ".", "00", " ", "123", "45", "x"]),
    ];
    for (pre, text, expected) in cases {
        assert_eq!(pieces(pre, text), *expected, "{pre} {text:?}");
    }
}

#[test]
fn cuts_cover_the_text_whatever_it_is() {
    let text = "Aé 日本\u{3000}١٢٣ \u{a0}\r\n\t🦀's 'LL _-_ ½\u{301} <x> \u{0} end  ";
    for name in CUTS.iter().flat_map(|cut| cut.names) {
        assert_eq!(pieces(name, text).concat(), text, "{name}");
    }
}

#[test]
fn unknown_kinds_are_refused_with_what_is_supported() {
    let refused = |vocabulary: GgufVocabulary| build(&vocabulary).unwrap_err().to_string();
    let pre = refused(GgufVocabulary { pre: "tekken".into(), ..byte_vocabulary() });
    assert!(pre.contains("\"tekken\"") && pre.contains("smollm, gpt-2, llama-bpe"), "{pre}");
    let missing = refused(GgufVocabulary { pre: String::new(), ..byte_vocabulary() });
    assert!(missing.contains("tokenizer.ggml.pre") && missing.contains("\"\""), "{missing}");
    let model = refused(GgufVocabulary { model: "llama".into(), ..byte_vocabulary() });
    assert!(model.contains("\"llama\"") && model.contains("gpt2"), "{model}");
}

#[test]
fn vocabularies_that_contradict_themselves_are_refused_with_the_numbers() {
    type Damage = fn(&mut GgufVocabulary);
    let cases: &[(Damage, &str)] = &[
        (|v| v.token_types.truncate(3), "269 tokens and 3 token types"),
        (|v| v.token_types[7] = 9, "token 7 has type 9"),
        (|v| v.bos = Some(269), "bos_token_id is 269, and there are 269 tokens"),
        (|v| v.padding = Some(u32::MAX), "padding_token_id is 4294967295"),
        (|v| (v.add_bos, v.bos) = (Some(true), None), "add_bos_token is true"),
        (|v| v.merges.push("ab".into()), "merge 9 is \"ab\""),
        (|v| v.merges.push("a b c".into()), "merge 9 is \"a b c\""),
        (|v| v.merges.push("a ".into()), "merge 9"),
        (|v| v.merges.push(String::new()), "merge 9"),
        (|v| v.merges.push("z z".into()), "zz"),
        (|v| v.merges.push("zz z".into()), "zz"),
        (|v| v.merges.push("<|begin|> <|begin|>".into()), "longer than any"),
        (|v| (v.tokens, v.token_types, v.bos, v.eos) = Default::default(), "0 tokens"),
        (|v| v.tokens.resize(VOCAB_MAX + 1, String::new()), "1048577 tokens"),
    ];
    for (damage, hint) in cases {
        let mut vocabulary = byte_vocabulary();
        damage(&mut vocabulary);
        let error = build(&vocabulary).unwrap_err().to_string();
        assert!(error.contains(hint), "{hint}: {error}");
    }
}

#[test]
fn token_types_decide_how_tokens_are_read_and_shown() {
    let tokenizer = build(&byte_vocabulary()).unwrap();
    let id = |text| tokenizer.id_of(text).unwrap();
    let (begin, end, tag) = (id("<|begin|>"), id("<|end|>"), id("<tag é>"));
    assert_eq!(tokenizer.encode("<|begin|>a<tag é>b<|end|>", false).unwrap(), [begin, 97, tag, 98, end]);
    assert!(tokenizer.is_special(end) && !tokenizer.is_special(tag));
    assert_eq!(tokenizer.decode(&[begin, 97, tag, 98, end], true), "a<tag é>b");
    assert_eq!(tokenizer.decode(&[begin, 97, tag, 98, end], false), "<|begin|>a<tag é>b<|end|>");
    // An unused id is no token: not found in text, decoded to nothing.
    assert_eq!(tokenizer.id_of("[PAD1]"), None);
    assert_eq!(tokenizer.decode(&tokenizer.encode("[PAD1]", false).unwrap(), false), "[PAD1]");
    assert_eq!((tokenizer.vocab_size(), tokenizer.token_bytes(268)), (269, None));
}

#[test]
fn files_without_token_types_have_normal_tokens_only() {
    let tokenizer = build(&GgufVocabulary { token_types: Vec::new(), ..byte_vocabulary() }).unwrap();
    assert_eq!(tokenizer.encode("<|end|>", false).unwrap().len(), 7);
    assert_eq!(tokenizer.end_tokens(), [tokenizer.eos().unwrap()]);
}

#[test]
fn of_two_tokens_with_one_text_the_first_is_encoded_to() {
    let mut vocabulary = byte_vocabulary();
    vocabulary.tokens.push("the".into());
    vocabulary.token_types.push(1);
    let tokenizer = build(&vocabulary).unwrap();
    let the = vocabulary.tokens.iter().position(|token| token == "the").unwrap() as TokenId;
    assert_eq!(tokenizer.encode("the", false).unwrap(), [the]);
    assert_eq!(tokenizer.decode(&[the, 269], false), "thethe");
}

#[test]
fn a_bos_is_added_where_the_file_or_its_family_says_so() {
    let starts = |pre: &str, add_bos, add_eos| {
        let vocabulary = GgufVocabulary { pre: pre.into(), add_bos, add_eos, ..byte_vocabulary() };
        let tokenizer = build(&vocabulary).unwrap();
        let text = |add_special| tokenizer.decode(&tokenizer.encode("a", add_special).unwrap(), false);
        assert_eq!(text(false), "a");
        text(true)
    };
    assert_eq!(starts("gpt-2", None, None), "a");
    assert_eq!(starts("gpt-2", Some(true), None), "<|begin|>a");
    assert_eq!(starts("llama-bpe", None, None), "<|begin|>a");
    assert_eq!(starts("llama-bpe", Some(false), None), "a");
    assert_eq!(starts("qwen2", None, Some(true)), "a<|end|>");
}

#[test]
fn all_tokens_that_end_a_turn_are_known() {
    let mut vocabulary = byte_vocabulary();
    for (text, kind) in [("<|im_end|>", 3), ("<|endoftext|>", 1), ("<|eot_id|>", 3)] {
        vocabulary.tokens.push(text.into());
        vocabulary.token_types.push(kind);
    }
    vocabulary.eom = Some(0);
    let tokenizer = build(&vocabulary).unwrap();
    assert_eq!(tokenizer.end_tokens(), [0, vocabulary.eos.unwrap(), 269, 271]);
}

#[test]
fn whole_pieces_skip_the_merges_only_where_the_family_does() {
    // No merge leads to "xyz".
    let with = |pre: &str| {
        let mut vocabulary = GgufVocabulary { pre: pre.into(), ..byte_vocabulary() };
        vocabulary.tokens.push("xyz".into());
        vocabulary.token_types.push(1);
        build(&vocabulary).unwrap().encode("xyz", false).unwrap().len()
    };
    assert_eq!((with("llama-bpe"), with("gpt-2")), (1, 3));
}

#[test]
fn only_qwen_composes_characters() {
    let with = |pre: &str| {
        let tokenizer = build(&GgufVocabulary { pre: pre.into(), ..byte_vocabulary() }).unwrap();
        tokenizer.decode(&tokenizer.encode("e\u{301}", false).unwrap(), false)
    };
    assert_eq!(with("qwen2"), "é");
    assert_eq!(with("llama-bpe"), "e\u{301}");
}
