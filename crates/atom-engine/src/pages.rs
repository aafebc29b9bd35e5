//! Pages of the KV cache: leases, and the prefix cache that lives in what leases leave behind.
//!
//! A page is *held* (by one or more leases), *kept* (by none, but still findable by its content until
//! somebody needs the room) or *vacant*. Page 0, the Sink, is none of these. No pointer lives here: a
//! [`PageId`] is an index into every layer's cache on whatever device the rank owns.

use atom_base::{PageId, TokenId};
use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard};
use xxhash_rust::xxh3::Xxh3;

/// Hash of a full page's tokens and of all pages before it: equal hashes mean equal prefixes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Prefix(u128);

/// All pages of one lane. Cheap to clone: a handle.
#[derive(Clone)]
pub struct Pages(Arc<Mutex<Pool>>);

/// Typed ownership of pages, in the order of the sequence that they hold. Dropping it returns them,
/// last page first, so that the tail of a prefix is forgotten before its head.
pub struct Lease {
    pages: Vec<PageId>,
    pool: Pages,
}

/// Invariants: `holders[p] == 0` exactly for pages that are vacant or in the kept list; the kept list
/// holds pages with content, least recently released first; `found[c] == p` exactly if `content[p] == c`.
struct Pool {
    page_size: usize,
    holders: Box<[u32]>,            // [pages]
    content: Box<[Option<Prefix>]>, // [pages], set once the page is full and computed
    older: Box<[u32]>,              // [pages], the kept list, linked both ways; NONE at its ends
    newer: Box<[u32]>,              // [pages]
    oldest: u32,
    newest: u32,
    kept: usize,
    vacant: Vec<PageId>,
    found: HashMap<Prefix, PageId>,
}

impl Prefix {
    /// The prefix that ends with this full page.
    pub fn extend(self, page: &[TokenId]) -> Self {
        let mut hasher = Xxh3::new();
        hasher.update(&self.0.to_le_bytes());
        for token in page {
            hasher.update(&token.to_le_bytes());
        }
        Self(hasher.digest128())
    }
}

impl Pages {
    /// A cache of `pages` pages, the Sink included, of `page_size` positions each.
    pub fn new(pages: usize, page_size: usize) -> Self {
        assert!(pages > 1 && page_size > 0, "{pages} pages of {page_size}: nothing but the Sink");
        assert!(u32::try_from(pages).is_ok_and(|p| p < NONE), "{pages} pages don't fit an id");
        Self(Arc::new(Mutex::new(Pool {
            page_size,
            holders: vec![0; pages].into(),
            content: vec![None; pages].into(),
            older: vec![NONE; pages].into(),
            newer: vec![NONE; pages].into(),
            oldest: NONE,
            newest: NONE,
            kept: 0,
            vacant: (1..pages as u32).rev().map(PageId).collect(),
            // A table that is at most half full clears its traces of removals in place; a fuller one
            // would grow, and allocate within a step.
            found: HashMap::with_capacity(2 * pages),
        })))
    }

    /// Pages that can be taken now: vacant ones and kept ones.
    pub fn room(&self) -> usize {
        let pool = self.pool();
        pool.vacant.len() + pool.kept
    }

    /// All pages but the Sink.
    pub fn total(&self) -> usize {
        self.pool().holders.len() - 1
    }

    /// Pages kept only for their content.
    pub fn kept(&self) -> usize {
        self.pool().kept
    }

    /// Positions of a page.
    pub fn page_size(&self) -> usize {
        self.pool().page_size
    }

    /// An empty lease with room for `pages` ids.
    pub fn lease(&self, pages: usize) -> Lease {
        Lease { pages: Vec::with_capacity(pages), pool: self.clone() }
    }

    /// Counts how many leading full pages of `tokens` are in the cache, and how many of those are
    /// kept (so taking them shrinks [`room`](Self::room)). Changes nothing.
    pub fn matching(&self, tokens: &[TokenId]) -> (usize, usize) {
        let pool = self.pool();
        let (mut prefix, mut pages, mut kept) = (Prefix::default(), 0, 0);
        for page in tokens.chunks_exact(pool.page_size) {
            prefix = prefix.extend(page);
            let Some(&found) = pool.found.get(&prefix) else { break };
            pages += 1;
            kept += usize::from(pool.holders[found.0 as usize] == 0);
        }
        (pages, kept)
    }

    fn pool(&self) -> MutexGuard<'_, Pool> {
        self.0.lock().expect("a panic under this lock ends the rank")
    }
}

impl Lease {
    /// The pages, in order of the sequence.
    pub fn pages(&self) -> &[PageId] {
        &self.pages
    }

    /// Shares the cached pages that hold the leading full pages of `tokens`, `pages_max` at most, and
    /// returns their prefix. The lease must be empty.
    pub fn share(&mut self, tokens: &[TokenId], pages_max: usize) -> Prefix {
        assert!(self.pages.is_empty(), "a prefix comes first");
        let mut pool = self.pool.pool();
        let mut prefix = Prefix::default();
        let size = pool.page_size;
        for page in tokens.chunks_exact(size).take(pages_max) {
            let next = prefix.extend(page);
            let Some(&found) = pool.found.get(&next) else { break };
            pool.hold(found);
            self.pages.push(found);
            prefix = next;
        }
        prefix
    }

    /// Takes one more page. False if there is no room: preempt somebody.
    pub fn grow(&mut self) -> bool {
        let page = self.pool.pool().take();
        self.pages.extend(page);
        page.is_some()
    }

    /// Publishes what page `index` of this lease holds. The first writer of a content wins: later
    /// equal pages stay private to their lease.
    pub fn seal(&self, index: usize, prefix: Prefix) {
        let page = self.pages[index];
        self.pool.pool().seal(page, prefix);
    }

    /// Returns all pages now.
    pub fn clear(&mut self) {
        let mut pool = self.pool.pool();
        for page in self.pages.drain(..).rev() {
            pool.give(page);
        }
    }
}

impl Drop for Lease {
    fn drop(&mut self) {
        // A panic ends the lane, and its pages with it. A second one here would end the process.
        if !std::thread::panicking() {
            self.clear();
        }
    }
}

impl Pool {
    fn take(&mut self) -> Option<PageId> {
        let page = self.vacant.pop().or_else(|| self.forget_oldest())?;
        let holders = &mut self.holders[page.0 as usize];
        assert_eq!(*holders, 0, "page {page} was free and has holders");
        *holders = 1;
        Some(page)
    }

    fn forget_oldest(&mut self) -> Option<PageId> {
        (self.oldest != NONE).then(|| {
            let page = PageId(self.oldest);
            self.unlink(page);
            let content = self.content[page.0 as usize].take().expect("kept pages have content");
            self.found.remove(&content);
            page
        })
    }

    fn hold(&mut self, page: PageId) {
        if self.holders[page.0 as usize] == 0 {
            self.unlink(page);
        }
        self.holders[page.0 as usize] += 1;
    }

    fn seal(&mut self, page: PageId, prefix: Prefix) {
        assert!(self.holders[page.0 as usize] > 0, "sealing page {page}, which nobody holds");
        if self.content[page.0 as usize].is_none() && !self.found.contains_key(&prefix) {
            self.found.insert(prefix, page);
            self.content[page.0 as usize] = Some(prefix);
        }
    }

    fn give(&mut self, page: PageId) {
        assert_ne!(page, PageId::SINK, "the Sink is never leased");
        let holders = &mut self.holders[page.0 as usize];
        assert!(*holders > 0, "page {page} was given back more often than taken");
        *holders -= 1;
        if *holders > 0 {
            return;
        }
        match self.content[page.0 as usize] {
            Some(_) => self.link_newest(page),
            None => self.vacant.push(page),
        }
    }

    fn link_newest(&mut self, page: PageId) {
        self.older[page.0 as usize] = self.newest;
        self.newer[page.0 as usize] = NONE;
        match self.newest {
            NONE => self.oldest = page.0,
            newest => self.newer[newest as usize] = page.0,
        }
        self.newest = page.0;
        self.kept += 1;
    }

    fn unlink(&mut self, page: PageId) {
        let (older, newer) = (self.older[page.0 as usize], self.newer[page.0 as usize]);
        match older {
            NONE => self.oldest = newer,
            older => self.newer[older as usize] = newer,
        }
        match newer {
            NONE => self.newest = older,
            newer => self.older[newer as usize] = older,
        }
        self.kept -= 1;
    }
}

/// The end of a linked list.
const NONE: u32 = u32::MAX;

#[cfg(test)]
#[path = "pages_tests.rs"]
mod tests;
