use super::*;
use crate::testing::{Draws, TempFolder, byte_vocabulary};
use crate::{GgufVocabulary, TokenizerSource};
use serde_json::json;

const WORDS: [&str; 24] = [
    "the",
    " the",
    "thing",
    " ",
    "  ",
    "\n",
    "é",
    "日本",
    "🦀",
    "12",
    "1",
    "'s",
    "<|end|>",
    "<|begin|>",
    "<|en",
    "d|>",
    "<tag é>",
    "<|end|><|end|>",
    "\u{0}",
    "\u{301}",
    "½",
    "<|",
    "end",
    "<|begin|>user\n",
];

fn load(change: impl FnOnce(&mut GgufVocabulary)) -> Arc<Tokenizer> {
    let mut vocabulary = byte_vocabulary();
    change(&mut vocabulary);
    Arc::new(Tokenizer::load(&TokenizerSource::Gguf(vocabulary)).unwrap())
}

fn text(draws: &mut Draws, words: usize) -> String {
    (0..draws.below(words)).map(|_| WORDS[draws.below(WORDS.len())]).collect()
}

/// Conversations that grow, begin alike, repeat messages and are cut anywhere.
fn check(tokenizer: &Arc<Tokenizer>, bytes_max: usize, seed: u64) -> TokenCacheCounts {
    let cache = TokenCache::new(tokenizer.clone(), bytes_max);
    let mut draws = Draws::new(seed);
    for _ in 0..30 {
        let mut turns = text(&mut draws, 60);
        for _ in 0..8 {
            turns.push_str(&text(&mut draws, 80));
            turns.push_str(WORDS[draws.below(WORDS.len())]);
            let mut prompt = turns.clone();
            // Now and then another end, which may complete or break up a token of the cut text.
            while draws.below(3) == 0 && prompt.pop().is_some() {}
            prompt.push_str(WORDS[draws.below(WORDS.len())]);
            for prompt in [&turns, &prompt] {
                let add_special = draws.below(2) == 0;
                assert_eq!(
                    cache.encode(prompt, add_special).unwrap(),
                    tokenizer.encode(prompt, add_special).unwrap(),
                    "{prompt:?}"
                );
                assert!(cache.counts().bytes <= bytes_max, "{:?}", cache.counts());
            }
        }
    }
    cache.counts()
}

#[test]
fn tokens_are_those_of_the_whole_text_however_it_was_cut_and_what_is_kept() {
    for pre in ["gpt-2", "smollm", "llama-bpe", "qwen2", "default"] {
        let tokenizer = load(|vocabulary| vocabulary.pre = pre.into());
        let roomy = check(&tokenizer, 1 << 20, 71);
        assert!(roomy.hit_bytes > 4 * roomy.miss_bytes, "{pre} {roomy:?}");
        // So small that most parts are thrown away before they come again, or are never kept.
        check(&tokenizer, 3 << 10, 72);
        assert_eq!(check(&tokenizer, 0, 73).parts, 0);
    }
}

/// A cut must be where the scan of the whole text finds a token, and not where its text merely stands.
#[test]
fn tokens_that_contain_or_overlap_each_other_are_found_as_in_the_whole_text() {
    let tokenizer = load(|vocabulary| {
        for (text, kind) in [("<|end|>!", 3), ("x<|en", 4), ("|><|", 3), ("<|end|><|end|>é", 4)] {
            vocabulary.tokens.push(text.into());
            vocabulary.token_types.push(kind);
        }
    });
    let (cache, mut draws) = (TokenCache::new(tokenizer.clone(), 1 << 20), Draws::new(74));
    let parts = ["<|end|>", "!", "x", "é", "<|begin|>", "<|en", "d|>", "|><|", " the thing", "12"];
    for _ in 0..300 {
        // Long enough that there are cuts.
        let prompt: String = (0..100).map(|_| parts[draws.below(parts.len())]).collect();
        assert_eq!(
            cache.encode(&prompt, false).unwrap(),
            tokenizer.encode(&prompt, false).unwrap(),
            "{prompt}"
        );
    }
    assert!(cache.counts().misses > 600, "{:?}", cache.counts());
}

#[test]
fn a_prompt_that_begins_with_an_earlier_one_costs_its_new_end() {
    let tokenizer = load(|_| {});
    let cache = TokenCache::new(tokenizer, 1 << 20);
    let turn = |n: usize| format!("<|begin|>user\n{}{n}<|end|>\n", "the thing ".repeat(100));
    let mut prompt = String::new();
    for n in 0..50 {
        prompt.push_str(&turn(n));
        let before = cache.counts();
        cache.encode(&format!("{prompt}<|begin|>assistant\n"), false).unwrap();
        let after = cache.counts();
        let new = (after.miss_bytes - before.miss_bytes) as usize;
        assert!(new <= turn(n).len() + 32, "turn {n}: {new} bytes anew");
        assert_eq!(after.hits - before.hits, n as u64);
    }
}

#[test]
fn a_run_of_blanks_is_refused_with_the_numbers_of_the_whole_text() {
    let tokenizer = load(|_| {});
    let cache = TokenCache::new(tokenizer.clone(), 1 << 20);
    let prompt = format!("{}<|end|>{}", "the ".repeat(100), " ".repeat((1 << 18) + 1));
    let errors = [cache.encode(&prompt, false), tokenizer.encode(&prompt, false)];
    let [ours, theirs] = errors.map(|outcome| outcome.unwrap_err().to_string());
    assert_eq!(ours, theirs);
}

#[test]
fn all_threads_share_what_is_kept() {
    let tokenizer = load(|_| {});
    let cache = TokenCache::new(tokenizer.clone(), 1 << 20);
    let prompt = "the thing <|end|>".repeat(40);
    let expected = tokenizer.encode(&prompt, true).unwrap();
    std::thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| (0..50).for_each(|_| assert_eq!(cache.encode(&prompt, true).unwrap(), expected)));
        }
    });
    let counts = cache.counts();
    let parts = cache.parts(&prompt).iter().filter(|part| part.len() >= PART_BYTES_MIN).count() as u64;
    assert_eq!(counts.hits + counts.misses, 4 * 50 * parts);
    assert!(counts.misses <= 4 * parts && counts.parts as u64 <= parts, "{counts:?}");
}

/// Tokens that look at their surroundings, and a way of cutting that knows where a piece stands.
#[test]
fn nothing_is_cut_where_it_could_show() {
    let plain = json!({
        "id": 3, "content": "<e>", "special": true, "normalized": false,
        "single_word": false, "lstrip": false, "rstrip": false,
    });
    let byte_level =
        json!({"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": true});
    let metaspace =
        json!({"type": "Metaspace", "replacement": "_", "prepend_scheme": "first", "split": true});
    let cases = [
        (json!({}), &byte_level, true),
        (json!({"rstrip": true}), &byte_level, false),
        (json!({"lstrip": true}), &byte_level, false),
        (json!({"single_word": true}), &byte_level, false),
        (json!({"normalized": true}), &byte_level, false),
        (json!({"content": "<e> "}), &byte_level, false),
        (json!({}), &json!({"type": "Sequence", "pretokenizers": [byte_level]}), true),
        (json!({}), &json!({"type": "Sequence", "pretokenizers": [metaspace, byte_level]}), false),
        (json!({}), &metaspace, false),
    ];
    for (change, pre_tokenizer, can_cut) in cases {
        let mut token = plain.clone();
        token.as_object_mut().unwrap().extend(change.as_object().unwrap().clone());
        let file = json!({
            "added_tokens": [token],
            "pre_tokenizer": pre_tokenizer,
            "decoder": {"type": "ByteLevel"},
            "model": {"type": "BPE", "vocab": {"a": 0, "b": 1, "ab": 2}, "merges": ["a b"]},
        });
        let folder = TempFolder::new();
        folder.write("tokenizer.json", &file.to_string());
        let tokenizer = Tokenizer::load(&TokenizerSource::Folder(folder.path().to_path_buf())).unwrap();
        assert_eq!(Cuts::of(&tokenizer).is_some(), can_cut, "{file}");
    }
}
