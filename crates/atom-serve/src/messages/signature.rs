//! The mark on a thinking block.
//!
//! The API signs what a model thought, and clients carry the signature back with the block. Ours is a
//! checksum: it finds a block that was changed or cut on the way, not a forger, who could ask the model
//! anything anyway.

use atom_base::hash::{FNV_64, fnv1a_64};

/// Follows the text of one block.
#[derive(Clone, Debug)]
pub(super) struct Signer {
    hash: u64,
}

impl Signer {
    pub(super) fn new() -> Self {
        Self { hash: FNV_64 }
    }

    pub(super) fn push(&mut self, text: &str) {
        self.hash = fnv1a_64(self.hash, text.bytes());
    }

    pub(super) fn sign(&self) -> String {
        format!("{MARK}{:016x}", self.hash)
    }
}

/// False when the signature is one of ours and the text isn't what it was made for. What other servers
/// signed can't be judged here.
pub(super) fn is_believable(signature: &str, thinking: &str) -> bool {
    if !signature.starts_with(MARK) {
        return true;
    }
    let mut signer = Signer::new();
    signer.push(thinking);
    signer.sign() == signature
}

const MARK: &str = "atom1-";

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_changed_block_shows_and_the_cuts_of_its_text_do_not() {
        let mut signer = Signer::new();
        signer.push("one ");
        signer.push("");
        signer.push("two");
        let signature = signer.sign();
        assert!(is_believable(&signature, "one two"));
        for changed in ["one tw", "", "one  two", "One two"] {
            assert!(!is_believable(&signature, changed), "{changed:?}");
        }
        assert!(!is_believable("atom1-", "one two") && is_believable("EqQBCgIYAhIM", "one two"));
    }
}
