//! Which lane a request goes to. Lanes of a group take every step together, so a group is as fast as
//! its fullest lane: requests are dealt by the work they add, in the unit of that work, bucket rows.

use atom_base::hash::{FNV_64, fnv1a_64};
use atom_base::{LaneId, TokenId};
use std::collections::{HashMap, VecDeque};

/// `--dp-load-balance`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum LoadBalance {
    /// By predicted work: prompt rows not in the lane's prefix cache, rounded up to buckets, plus decode
    /// rows; a lane does not cross a bucket's edge alone while another has room.
    #[default]
    Work,
    /// In turn.
    RoundRobin,
    /// The lane with the fewest open requests; among equals the fewest open prompt tokens.
    LeastRequests,
    /// The lane with the fewest open prompt tokens, a request counting as 512 more.
    LeastTokens,
}

/// What is open on a lane: taken and not ended.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct LaneLoad {
    /// Requests.
    pub requests: usize,
    /// Their prompt tokens.
    pub tokens: usize,
    /// Rows predicted for the prompts of those that have not started.
    pub backlog: usize,
}

/// Where a request goes, and the rows predicted for its prompt there.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Placement {
    /// Where.
    pub lane: LaneId,
    /// Prompt rows that are not expected in that lane's prefix cache.
    pub prefill_rows: usize,
}

/// Deals requests to lanes. Remembers which lane saw which prompt's pages and which session; both are
/// predictions, bounded in number, and a wrong one costs time and nothing else.
pub struct Balancer {
    rule: LoadBalance,
    /// Rows of the buckets, ascending.
    edges: Box<[usize]>,
    page_size: usize,
    /// Open requests at which a lane takes no more.
    full: usize,
    pages: Recent<u64, Lanes>, // hash of a prompt's first pages -> lanes that saw them
    sessions: Recent<u64, LaneId>,
    turn: usize,
}

/// A set of lanes, a bit each; room for as many as there are.
type Lanes = Box<[u64]>;

/// A map that forgets the oldest entry when it is full.
struct Recent<K, V> {
    entries: HashMap<K, V>,
    order: VecDeque<K>,
    max: usize,
}

impl Balancer {
    /// `edges` are the rows of the lattice's buckets; pages are of `page_size` tokens, or no prompt is
    /// ever found in a cache (`None`). A lane with `full` open requests takes no more.
    pub fn new(rule: LoadBalance, edges: Box<[usize]>, page_size: Option<usize>, full: usize) -> Self {
        let page_size = page_size.unwrap_or(usize::MAX);
        Self {
            rule,
            edges,
            page_size,
            full,
            pages: Recent::new(PAGES_REMEMBERED),
            sessions: Recent::new(SESSIONS_REMEMBERED),
            turn: 0,
        }
    }

    /// Chooses a lane: the one `asked` for, full or not, else the `session`'s, else by the rule. Lanes that
    /// are full are passed over; nothing if all are. `loads[l]` is what lane `l` has open.
    pub fn place(
        &mut self,
        loads: &[LaneLoad],
        prompt: &[TokenId],
        asked: Option<LaneId>,
        session: Option<u64>,
    ) -> Option<Placement> {
        let hashes = self.page_hashes(prompt);
        let cached = self.cached_pages(&hashes, loads.len());
        let known = || session.and_then(|session| self.sessions.find(&session).copied());
        let has_room = |lane: &LaneId| loads[usize::from(lane.0)].requests < self.full;
        let lane = match asked.or_else(|| known().filter(has_room)) {
            Some(lane) => lane,
            None => LaneId(self.choose(loads, prompt.len(), &cached)? as u16),
        };
        if let Some(session) = session {
            self.sessions.insert(session, lane);
        }
        let at = usize::from(lane.0);
        for &hash in &hashes {
            let none = || vec![0; loads.len().div_ceil(64)].into();
            self.pages.find_or_insert(hash, none)[at / 64] |= 1 << (at % 64);
        }
        Some(Placement { lane, prefill_rows: self.uncached(prompt.len(), cached[at]) })
    }

    fn choose(&mut self, loads: &[LaneLoad], prompt: usize, cached: &[usize]) -> Option<usize> {
        let first = self.turn % loads.len();
        self.turn = self.turn.wrapping_add(1);
        let has_room = |&lane: &usize| loads[lane].requests < self.full;
        let mut in_turn = (0..loads.len()).map(|i| (first + i) % loads.len()).filter(has_room);
        match self.rule {
            LoadBalance::RoundRobin => in_turn.next(),
            LoadBalance::LeastRequests => in_turn.min_by_key(|&l| (loads[l].requests, loads[l].tokens)),
            LoadBalance::LeastTokens => {
                in_turn.min_by_key(|&l| loads[l].tokens + REQUEST_ROWS * loads[l].requests)
            }
            LoadBalance::Work => {
                let fullest = loads.iter().map(|load| self.edge(load.requests)).max().unwrap_or(0);
                in_turn.min_by_key(|&l| {
                    let load = loads[l];
                    let rows = load.backlog + self.uncached(prompt, cached[l]);
                    let crosses = self.edge(load.requests + 1) > fullest;
                    self.buckets(rows) + REQUEST_ROWS * (load.requests + 1 + usize::from(crosses))
                })
            }
        }
    }

    /// Rows of the smallest bucket that holds `rows`; the largest for more.
    fn edge(&self, rows: usize) -> usize {
        let at = self.edges.partition_point(|&edge| edge < rows);
        if rows == 0 { 0 } else { self.edges[at.min(self.edges.len() - 1)] }
    }

    /// Rows of the steps that `rows` prompt rows take: full ones, and the bucket of the rest.
    fn buckets(&self, rows: usize) -> usize {
        let top = self.edges[self.edges.len() - 1];
        rows / top * top + self.edge(rows % top)
    }

    /// A prompt's last token is always computed.
    fn uncached(&self, prompt: usize, cached_pages: usize) -> usize {
        prompt - cached_pages.saturating_mul(self.page_size).min(prompt.saturating_sub(1))
    }

    /// For each lane, how many of the prompt's first pages it saw.
    fn cached_pages(&self, hashes: &[u64], lanes: usize) -> Vec<usize> {
        let mut cached = vec![0; lanes];
        for (index, hash) in hashes.iter().enumerate() {
            let Some(saw) = self.pages.find(hash) else { break };
            let mut is_seen = false;
            for (lane, cached) in cached.iter_mut().enumerate() {
                // Only who has all pages up to here has use for this one.
                if *cached == index && saw[lane / 64] >> (lane % 64) & 1 == 1 {
                    *cached = index + 1;
                    is_seen = true;
                }
            }
            if !is_seen {
                break;
            }
        }
        cached
    }

    /// A hash for each whole page, of all tokens up to its end (FNV-1a over tokens).
    fn page_hashes(&self, prompt: &[TokenId]) -> Vec<u64> {
        let mut hash = FNV_64;
        let page = |tokens: &[TokenId]| {
            hash = fnv1a_64(hash, tokens.iter().copied());
            hash
        };
        prompt.chunks_exact(self.page_size.min(prompt.len() + 1)).take(PROMPT_PAGES_MAX).map(page).collect()
    }
}

impl<K: Copy + Eq + std::hash::Hash, V> Recent<K, V> {
    fn new(max: usize) -> Self {
        Self { entries: HashMap::new(), order: VecDeque::new(), max }
    }

    fn find(&self, key: &K) -> Option<&V> {
        self.entries.get(key)
    }

    fn insert(&mut self, key: K, value: V) {
        if self.entries.insert(key, value).is_some() {
            return;
        }
        self.order.push_back(key);
        if self.order.len() > self.max {
            let oldest = self.order.pop_front().expect("it is longer than its bound");
            self.entries.remove(&oldest);
        }
    }

    fn find_or_insert(&mut self, key: K, value: impl FnOnce() -> V) -> &mut V {
        if self.find(&key).is_none() {
            self.insert(key, value());
        }
        self.entries.get_mut(&key).expect("it was there or was put there, as the newest")
    }
}

/// What an open request weighs in prompt rows: it adds a row to some hundred steps to come.
const REQUEST_ROWS: usize = 512;
/// Pages whose lanes are remembered: 2^16 of 16 tokens are a million tokens, more than most caches hold.
const PAGES_REMEMBERED: usize = 1 << 16;
/// Pages of one prompt that are looked at: beyond 16,384 tokens of 16-token pages lanes hardly differ.
const PROMPT_PAGES_MAX: usize = 1024;
/// Sessions whose lane is remembered.
const SESSIONS_REMEMBERED: usize = 1 << 16;

#[cfg(test)]
mod tests {
    use super::*;

    const EDGES: &[usize] = &[1, 2, 4, 8, 16, 32, 64, 128, 256, 512];

    fn balancer(rule: LoadBalance) -> Balancer {
        Balancer::new(rule, EDGES.into(), Some(16), 100)
    }

    /// Takes requests one after the other, none of which starts or ends; returns requests of each lane.
    fn burst(rule: LoadBalance, lanes: usize, prompts: &[Vec<TokenId>]) -> Vec<LaneLoad> {
        let (mut balancer, mut loads) = (balancer(rule), vec![LaneLoad::default(); lanes]);
        for prompt in prompts {
            let placement = balancer.place(&loads, prompt, None, None).unwrap();
            charge(&mut loads, placement, prompt.len());
        }
        loads
    }

    fn charge(loads: &mut [LaneLoad], placement: Placement, prompt: usize) {
        let load = &mut loads[usize::from(placement.lane.0)];
        load.requests += 1;
        load.tokens += prompt;
        load.backlog += placement.prefill_rows;
    }

    fn prompt(seed: u32, len: usize) -> Vec<TokenId> {
        (0..len as u32).map(|i| seed.wrapping_mul(0x9e37_79b9) ^ i).collect()
    }

    /// B-82: a stale snapshot and a fixed tie-break piled bursts up on one rank.
    #[test]
    fn b_82_a_burst_of_64_equal_requests_on_4_lanes_gives_16_each() {
        for rule in
            [LoadBalance::Work, LoadBalance::RoundRobin, LoadBalance::LeastRequests, LoadBalance::LeastTokens]
        {
            let same: Vec<_> = (0..64).map(|_| prompt(1, 100)).collect();
            let different: Vec<_> = (0..64).map(|seed| prompt(seed, 100)).collect();
            for prompts in [same, different] {
                let requests: Vec<_> = burst(rule, 4, &prompts).iter().map(|load| load.requests).collect();
                assert!(requests.iter().all(|n| (15..=17).contains(n)), "{rule:?}: {requests:?}");
            }
        }
    }

    #[test]
    fn b_82_mixed_lengths_leave_token_counts_even() {
        let prompts: Vec<_> = (0..200).map(|i| prompt(i, 10 + (i as usize * 977) % 3000)).collect();
        for rule in [LoadBalance::Work, LoadBalance::LeastTokens] {
            let work: Vec<_> =
                burst(rule, 4, &prompts).iter().map(|l| l.tokens + REQUEST_ROWS * l.requests).collect();
            let (least, most) = (work.iter().min().unwrap(), work.iter().max().unwrap());
            assert!((most - least) as f64 <= 0.05 * *most as f64, "{rule:?}: {work:?}");
        }
    }

    #[test]
    fn no_lane_crosses_an_edge_alone_while_another_has_room() {
        let mut balancer = balancer(LoadBalance::Work);
        // Lane 0 sits on the edge of 8 with nothing to prefill; lane 1 has 7 and a short prompt waiting.
        let full = LaneLoad { requests: 8, tokens: 80, backlog: 0 };
        let room = LaneLoad { requests: 7, tokens: 70, backlog: 900 };
        assert_eq!(balancer.place(&[full, room], &prompt(1, 10), None, None).unwrap().lane, LaneId(1));
        // Both on the edge: somebody has to.
        let waiting = LaneLoad { backlog: 900, ..full };
        assert_eq!(balancer.place(&[waiting, full], &prompt(2, 10), None, None).unwrap().lane, LaneId(1));
    }

    #[test]
    fn a_prompt_goes_where_its_beginning_was_computed() {
        let mut balancer = balancer(LoadBalance::Work);
        let (mut loads, long) = (vec![LaneLoad::default(); 4], prompt(7, 2000));
        let first = balancer.place(&loads, &long, None, None).unwrap();
        assert_eq!(first.prefill_rows, 2000);
        // It has started: its prompt is no backlog any more, but it still decodes.
        loads[usize::from(first.lane.0)] = LaneLoad { requests: 1, tokens: 2000, backlog: 0 };
        let mut longer = long.clone();
        longer.extend(prompt(8, 40));
        let second = balancer.place(&loads, &longer, None, None).unwrap();
        assert_eq!((second.lane, second.prefill_rows), (first.lane, 40));
        // A short common beginning does not outweigh a row in some hundred steps.
        let short = balancer.place(&loads, &long[..100], None, None).unwrap();
        assert_ne!(short.lane, first.lane);
    }

    #[test]
    fn a_rank_that_was_asked_for_and_a_session_come_first() {
        let mut balancer = balancer(LoadBalance::Work);
        let mut loads = vec![LaneLoad::default(); 4];
        loads[2] = LaneLoad { requests: 50, tokens: 5000, backlog: 5000 };
        let asked = Some(LaneId(2));
        assert_eq!(balancer.place(&loads, &prompt(1, 10), asked, Some(77)).unwrap().lane, LaneId(2));
        assert_eq!(balancer.place(&loads, &prompt(2, 10), None, Some(77)).unwrap().lane, LaneId(2));
        assert_ne!(balancer.place(&loads, &prompt(3, 10), None, Some(78)).unwrap().lane, LaneId(2));
    }

    #[test]
    fn beginnings_are_found_on_any_of_1024_lanes() {
        let mut balancer = balancer(LoadBalance::Work);
        let mut loads = vec![LaneLoad::default(); 1024];
        for lane in [0, 63, 64, 700, 1023] {
            let asked = Some(LaneId(lane as u16));
            let long = prompt(lane, 2000);
            balancer.place(&loads, &long, asked, None).unwrap();
            // The lane has work, but less than the prompt would be elsewhere.
            loads[lane as usize] = LaneLoad { requests: 1, tokens: 2000, backlog: 0 };
            let placement = balancer.place(&loads, &long, None, None).unwrap();
            assert_eq!((placement.lane, placement.prefill_rows), (LaneId(lane as u16), 1));
        }
    }

    #[test]
    fn full_lanes_are_passed_over_unless_asked_for() {
        let full = LaneLoad { requests: 100, tokens: 0, backlog: 0 };
        for rule in [LoadBalance::Work, LoadBalance::RoundRobin, LoadBalance::LeastTokens] {
            let mut balancer = balancer(rule);
            let first = balancer.place(&[LaneLoad::default(); 2], &prompt(1, 5), None, Some(9)).unwrap().lane;
            let mut loads = [LaneLoad::default(); 2];
            loads[usize::from(first.0)] = full;
            for seed in 2..6 {
                let lane = balancer.place(&loads, &prompt(seed, 5), None, Some(9)).unwrap().lane;
                assert_ne!(lane, first, "{rule:?}");
            }
            assert_eq!(balancer.place(&loads, &prompt(7, 5), Some(first), None).unwrap().lane, first);
            assert_eq!(balancer.place(&[full; 2], &prompt(8, 5), None, None), None, "{rule:?}");
        }
    }

    #[test]
    fn memory_of_pages_is_bounded() {
        let mut recent = Recent::new(3);
        (0..10).for_each(|key| recent.insert(key, key));
        recent.insert(9, 90);
        assert_eq!((recent.entries.len(), recent.order.len()), (3, 3));
        assert_eq!((recent.find(&9), recent.find(&6)), (Some(&90), None));
    }

    #[test]
    fn without_a_prefix_cache_nothing_is_ever_cached() {
        let mut balancer = Balancer::new(LoadBalance::Work, EDGES.into(), None, 100);
        let loads = vec![LaneLoad::default(); 2];
        for _ in 0..3 {
            assert_eq!(balancer.place(&loads, &prompt(1, 2000), None, None).unwrap().prefill_rows, 2000);
        }
    }
}
