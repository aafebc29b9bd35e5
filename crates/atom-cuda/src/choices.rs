//! Which algorithm each product got, kept on disk beside the compiled kernels: timed once, and the same at every start and for
//! all ranks of a process. Ranks of a lane compute the same rows, and must not add them in different orders.

use crate::blas::Product;
use crate::compile::{hex, recall, remember};
use sha2::{Digest, Sha256};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};

/// An algorithm as cuBLASLt gives it out: words that mean something to the same version of it only.
pub(crate) type Words = [u64; 8];

/// The choices of one GPU, one version of cuBLASLt and one order of sums.
pub(crate) struct Choices {
    file: Option<PathBuf>,
    /// What the file is for: its first line, and in its name.
    of: String,
    kept: BTreeMap<String, Words>,
    /// What products got untimed, for this process only.
    first: BTreeMap<String, Words>,
}

/// The choices of a process, for all GPUs and orders that its ranks have.
#[derive(Default)]
pub struct AllChoices(Mutex<BTreeMap<String, Arc<Mutex<Choices>>>>);

impl AllChoices {
    /// Those for a GPU, a version and an order, in words: opened once.
    pub(crate) fn of(&self, folder: Option<&Path>, of: String) -> Arc<Mutex<Choices>> {
        let mut all = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let open = || Arc::new(Mutex::new(Choices::open(folder, of.clone())));
        Arc::clone(all.entry(of.clone()).or_insert_with(open))
    }
}

impl Choices {
    /// Those that the folder has; none if there is no folder, or no file that is whole and for this.
    pub(crate) fn open(folder: Option<&Path>, of: String) -> Self {
        let name = format!("products-{}", hex(&Sha256::digest(&of)[..16]));
        let file = folder.map(|folder| folder.join(name));
        let mut choices = Self { file, of, kept: BTreeMap::new(), first: BTreeMap::new() };
        choices.kept = choices.on_disk();
        choices
    }

    fn on_disk(&self) -> BTreeMap<String, Words> {
        let text = self.file.as_deref().and_then(recall).and_then(|bytes| String::from_utf8(bytes).ok());
        text.and_then(|text| parse(&text, &self.of)).unwrap_or_default()
    }

    /// What a product got.
    pub(crate) fn of(&self, product: &Product) -> Option<Words> {
        let product = format!("{product:?}");
        self.kept.get(&product).or_else(|| self.first.get(&product)).copied()
    }

    /// From now on a product has this one in this process; another start may time it.
    pub(crate) fn agree(&mut self, product: &Product, algorithm: Words) {
        self.first.insert(format!("{product:?}"), algorithm);
    }

    /// From now on a product has this one.
    pub(crate) fn keep(&mut self, product: &Product, algorithm: Words) {
        self.kept.insert(format!("{product:?}"), algorithm);
    }

    /// Writes all of them, and those that another process has written since.
    pub(crate) fn save(&mut self) {
        let others = self.on_disk();
        let Some(file) = &self.file else { return };
        for (product, words) in others {
            self.kept.entry(product).or_insert(words);
        }
        let lines = self.kept.iter().map(|(product, words)| {
            let words: Vec<String> = words.iter().map(|word| format!("{word:016x}")).collect();
            format!("{}\t{product}\n", words.join(" "))
        });
        let text: String = std::iter::once(format!("{}\n", self.of)).chain(lines).collect();
        if let Err(error) = remember(file, text.as_bytes()) {
            // The next start times again: slower, and as right.
            tracing::warn!("{} could not be written: {error}", file.display());
        }
    }
}

/// The lines below the first, which says what they are for; nothing if one of them is not as `save` writes it.
fn parse(text: &str, of: &str) -> Option<BTreeMap<String, Words>> {
    let mut lines = text.lines();
    if lines.next()? != of {
        return None;
    }
    let parse_line = |line: &str| {
        let (words, product) = line.split_once('\t')?;
        let words: Option<Vec<u64>> =
            words.split(' ').map(|word| u64::from_str_radix(word, 16).ok()).collect();
        Some((product.to_owned(), Words::try_from(words?).ok()?))
    };
    lines.map(parse_line).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::element::Element;

    fn product(rows: usize) -> Product {
        let (element, out) = (Element::BF16, Element::F32);
        Product { rows, inputs: 64, outputs: 96, element, out, adds: false }
    }

    #[test]
    fn what_was_kept_is_there_at_the_next_start_and_for_nobody_else() {
        let folder = std::env::temp_dir().join(format!("atom-choices-{}", std::process::id()));
        let open = |of: &str| Choices::open(Some(&folder), of.to_owned());
        let mut first = open("a GPU");
        assert_eq!(first.of(&product(8)), None);
        let words = [1, u64::MAX, 3, 0, 5, 6, 7, 8];
        first.keep(&product(8), words);
        first.keep(&product(9), [9; 8]);
        first.save();
        let second = open("a GPU");
        assert_eq!((second.of(&product(8)), second.of(&product(9))), (Some(words), Some([9; 8])));
        assert_eq!(second.of(&product(10)), None);
        assert_eq!(open("another GPU").of(&product(8)), None);

        // Both were open before either wrote.
        let (mut one, mut other) = (open("two starts"), open("two starts"));
        one.keep(&product(1), [1; 8]);
        one.save();
        other.keep(&product(2), [2; 8]);
        other.save();
        let both = open("two starts");
        assert_eq!([1, 2].map(|rows| both.of(&product(rows))), [Some([1; 8]), Some([2; 8])]);

        // Ranks of a process have one set, with what was not timed; nobody else has that.
        let all = AllChoices::default();
        let [one, other] = [(); 2].map(|()| all.of(Some(&folder), "two starts".into()));
        one.lock().unwrap().agree(&product(3), [3; 8]);
        assert_eq!(other.lock().unwrap().of(&product(3)), Some([3; 8]));
        one.lock().unwrap().save();
        assert_eq!(open("two starts").of(&product(3)), None);

        // A byte that changed: the digest says so.
        let file = second.file.clone().expect("a folder was given");
        let mut bytes = std::fs::read(&file).unwrap();
        *bytes.last_mut().unwrap() ^= 1;
        std::fs::write(&file, bytes).unwrap();
        assert_eq!(open("a GPU").of(&product(8)), None);
        std::fs::remove_dir_all(&folder).unwrap();
    }

    #[test]
    fn lines_that_nobody_wrote_are_no_choices() {
        let line = format!("{}\tp\n", ["0"; 8].join(" "));
        assert_eq!(parse(&format!("of\n{line}"), "of").unwrap().len(), 1);
        for text in ["", "other\n", "of\n1 2 3\tp\n", "of\n0 0 0 0 0 0 0 0 p\n", "of\n0 0 0 0 0 0 0 x\tp\n"] {
            assert!(parse(text, "of").is_none(), "{text:?}");
        }
    }
}
