//! Pages against a naive model that searches linearly and keeps everything in plain lists.

use super::*;
use proptest::prelude::*;

const SIZE: usize = 2;

#[test]
fn content_outlives_its_lease_until_the_room_is_needed() {
    let pages = Pages::new(3, SIZE);
    let mut lease = pages.lease(2);
    assert!(lease.grow());
    let held = lease.pages()[0];
    lease.seal(0, Prefix::default().extend(&[1, 2]));
    drop(lease);
    assert_eq!((pages.room(), pages.kept(), pages.matching(&[1, 2, 3])), (2, 1, (1, 1)));
    let mut again = pages.lease(2);
    again.share(&[1, 2, 3], 8);
    assert_eq!(again.pages(), [held]);
    again.clear();
    let mut other = pages.lease(2);
    assert!(other.grow() && other.grow() && !other.grow());
    assert_eq!(pages.matching(&[1, 2]), (0, 0));
}

#[test]
fn the_sink_is_never_leased() {
    let pages = Pages::new(5, SIZE);
    let mut lease = pages.lease(4);
    while lease.grow() {}
    assert_eq!(lease.pages().len(), 4);
    assert!(!lease.pages().contains(&PageId::SINK));
}

#[test]
fn the_tail_of_a_prefix_is_forgotten_before_its_head() {
    let pages = Pages::new(3, SIZE);
    let mut lease = pages.lease(2);
    assert!(lease.grow() && lease.grow());
    let head = Prefix::default().extend(&[1, 2]);
    lease.seal(0, head);
    lease.seal(1, head.extend(&[3, 4]));
    drop(lease);
    let mut other = pages.lease(1);
    assert!(other.grow());
    assert_eq!(pages.matching(&[1, 2, 3, 4]).0, 1);
}

#[derive(Clone, Debug)]
enum Action {
    Start(Vec<TokenId>),
    Grow(usize),
    Seal(usize),
    Drop(usize),
}

fn action() -> impl Strategy<Value = Action> {
    prop_oneof![
        // A small alphabet, so that prefixes meet.
        prop::collection::vec(0u32..2, 0..9).prop_map(Action::Start),
        (0usize..6).prop_map(Action::Grow),
        (0usize..6).prop_map(Action::Seal),
        (0usize..6).prop_map(Action::Drop),
    ]
}

/// What a page holds and who holds it, searched linearly.
#[derive(Default)]
struct Model {
    held: Vec<(PageId, usize)>,           // page, holders
    content: Vec<(PageId, Vec<TokenId>)>, // page, all tokens up to its end
    released: Vec<PageId>,                // with content, oldest first
}

struct Run {
    lease: Lease,
    tokens: Vec<TokenId>,
    sealed: usize,
    prefix: Prefix,
}

impl Model {
    fn holders(&mut self, page: PageId) -> &mut usize {
        let at = self.held.iter().position(|h| h.0 == page).unwrap_or_else(|| {
            self.held.push((page, 0));
            self.held.len() - 1
        });
        &mut self.held[at].1
    }

    fn find(&self, tokens: &[TokenId]) -> Option<PageId> {
        self.content.iter().find(|c| c.1 == tokens).map(|c| c.0)
    }

    fn take(&mut self, page: PageId) {
        *self.holders(page) += 1;
        self.released.retain(|&r| r != page);
    }

    fn give(&mut self, lease: &Lease) {
        for &page in lease.pages().iter().rev() {
            *self.holders(page) -= 1;
            if *self.holders(page) == 0 && self.content.iter().any(|c| c.0 == page) {
                self.released.push(page);
            }
        }
    }
}

proptest! {
    #[test]
    fn pages_agree_with_a_naive_model(actions in prop::collection::vec(action(), 1..120)) {
        const TOTAL: usize = 8;
        let pages = Pages::new(TOTAL + 1, SIZE);
        let (mut model, mut runs) = (Model::default(), Vec::<Run>::new());
        for action in actions {
            match action {
                Action::Start(tokens) => {
                    let mut lease = pages.lease(8);
                    let prefix = lease.share(&tokens, 8);
                    let mut expected = Vec::new();
                    for end in (SIZE..=tokens.len()).step_by(SIZE) {
                        let Some(page) = model.find(&tokens[..end]) else { break };
                        expected.push(page);
                    }
                    prop_assert_eq!(lease.pages(), &expected[..]);
                    expected.iter().for_each(|&page| model.take(page));
                    let sealed = expected.len();
                    runs.push(Run { lease, tokens, sealed, prefix });
                }
                Action::Grow(at) if !runs.is_empty() => {
                    let at = at % runs.len();
                    let free = TOTAL - model.held.iter().filter(|h| h.1 > 0).count();
                    let vacant = free - model.released.len();
                    let grew = runs[at].lease.grow();
                    prop_assert_eq!(grew, free > 0);
                    if grew {
                        let page = *runs[at].lease.pages().last().unwrap();
                        if vacant == 0 {
                            prop_assert_eq!(page, model.released[0], "the least recently released is reused first");
                        }
                        model.content.retain(|c| c.0 != page);
                        model.take(page);
                        prop_assert_eq!(*model.holders(page), 1);
                    }
                }
                Action::Seal(at) if !runs.is_empty() => {
                    let at = at % runs.len();
                    let run = &mut runs[at];
                    let (from, to) = (run.sealed * SIZE, (run.sealed + 1) * SIZE);
                    if run.sealed < run.lease.pages().len() && to <= run.tokens.len() {
                        run.prefix = run.prefix.extend(&run.tokens[from..to]);
                        run.lease.seal(run.sealed, run.prefix);
                        if model.find(&run.tokens[..to]).is_none() {
                            model.content.push((run.lease.pages()[run.sealed], run.tokens[..to].to_vec()));
                        }
                        run.sealed += 1;
                    }
                }
                Action::Drop(at) if !runs.is_empty() => {
                    let run = runs.remove(at % runs.len());
                    model.give(&run.lease);
                }
                _ => {}
            }
            let held = model.held.iter().filter(|h| h.1 > 0).count();
            prop_assert_eq!(pages.room(), TOTAL - held);
            prop_assert_eq!(pages.kept(), model.released.len());
        }
    }
}
