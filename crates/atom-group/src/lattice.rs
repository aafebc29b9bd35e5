//! Buckets: the only notion of shape. Every collective, recording key, padding and buffer size comes
//! from one, and only the lattice makes them.

use crate::facts::Facts;
use thiserror::Error;

/// Buckets of one lattice at the most; recordings and signatures are kept in arrays of this length.
pub const BUCKETS_MAX: usize = 128;

/// The shape of a step: row capacity, and capacity of rows with logits.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Bucket {
    index: u16,
    rows: u32,
    out_rows: u32,
}

/// The sorted set of legal buckets, derived once.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Lattice {
    buckets: Box<[Bucket]>,
    max_num_seqs: u32,
}

/// What a lattice is derived from. The default has no bounds of a mesh or a workspace; the first two
/// fields must be set.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct LatticeArgs {
    /// `--max-num-batched-tokens`: rows of the largest bucket.
    pub rows_max: u32,
    /// `--max-num-seqs`: rows with logits of one lane.
    pub max_num_seqs: u32,
    /// `ATOM_TOKEN_GRAPH_SIZES`: replaces the sizes above `max_num_seqs`.
    pub sizes: Option<Vec<u32>>,
    /// Every bucket is a multiple of it: what the mesh scatters rows over, times the tile that its
    /// kernels ask for. Sizes that are not are rounded up, the user's and the top too: a bucket may
    /// hold a few rows more than `rows_max`, which no lane ever wants.
    pub multiple_of: u32,
    /// Rows of the largest bucket whose workspace fits, the rows of all lanes in it counted by whoever
    /// planned the memory. `None`: no such bound.
    pub rows_workspace_max: Option<u32>,
}

/// The largest row count of any lane of the group: made from everybody's facts, never from one's own.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct GroupRows(u32);

/// A lattice that can't be: the user's fault, found at start.
#[derive(Clone, Debug, Error, PartialEq, Eq)]
pub enum LatticeError {
    /// A bound of zero.
    #[error("{flag} is 0; a step needs at least one row")]
    Zero {
        /// The flag.
        flag: &'static str,
    },
    /// Decoding everybody at once would not fit into one step.
    #[error(
        "--max-num-batched-tokens {rows_max} is less than --max-num-seqs {max_num_seqs}: every running request needs \
         a row in a step; raise the first or lower the second"
    )]
    TooNarrow {
        /// `--max-num-batched-tokens`.
        rows_max: u32,
        /// `--max-num-seqs`.
        max_num_seqs: u32,
    },
    /// A size of `ATOM_TOKEN_GRAPH_SIZES` that no step can have.
    #[error(
        "ATOM_TOKEN_GRAPH_SIZES has {size}; sizes are from 1 to --max-num-batched-tokens, here {rows_max}"
    )]
    SizeOutOfRange {
        /// The size.
        size: u32,
        /// The top.
        rows_max: u32,
    },
    /// A step would need more workspace than there is.
    #[error(
        "the largest steps of {rows} rows (sizes are multiples of {multiple_of}) do not fit: there is workspace for \
         {rows_workspace_max}; {}give steps more memory",
        lower(*possible)
    )]
    Workspace {
        /// Rows of the step.
        rows: u32,
        /// What sizes are multiples of.
        multiple_of: u32,
        /// What fits.
        rows_workspace_max: u32,
        /// The largest legal size that fits; 0 if none does.
        possible: u32,
    },
    /// More sizes than recordings are kept for.
    #[error(
        "--max-num-batched-tokens, --max-num-seqs and ATOM_TOKEN_GRAPH_SIZES make {count} step sizes; at most {max} are \
         kept: lower the first two or list fewer sizes",
        max = BUCKETS_MAX
    )]
    TooMany {
        /// How many.
        count: usize,
    },
    /// A text that is no list of sizes.
    #[error(
        "ATOM_TOKEN_GRAPH_SIZES is a comma-separated list of row counts, for example 256,512,1024; {text:?} is not a number"
    )]
    NotANumber {
        /// The offending part.
        text: String,
    },
}

impl Bucket {
    /// Row capacity of each lane.
    pub fn rows(self) -> usize {
        self.rows as usize
    }

    /// Capacity of rows with logits of each lane: `min(rows, max_num_seqs)`.
    pub fn out_rows(self) -> usize {
        self.out_rows as usize
    }

    /// Place in the lattice: the key of its recording.
    pub fn index(self) -> usize {
        usize::from(self.index)
    }
}

impl GroupRows {
    /// The largest count over all lanes, each lane's capped by `top` as grants are.
    pub fn of(facts: &[Facts], top: Bucket) -> Self {
        let rows = facts.iter().map(|f| f.decode_rows.saturating_add(f.prefill_rows).min(top.rows));
        Self(rows.max().unwrap_or(0))
    }

    /// The same for rows that `settle` derived from all facts, already capped.
    pub(crate) fn settled(rows: u32) -> Self {
        Self(rows)
    }

    pub(crate) fn count(self) -> u32 {
        self.0
    }
}

impl Lattice {
    /// Derives and checks the sizes.
    ///
    /// Small sizes are dense, since decoding lanes sit there and padding costs them most: 1, 2, 4, 8,
    /// then every 4 to 32, every 8 to 256, then every eighth of the power of two below. All are then
    /// rounded up to `multiple_of`, and what does not fit the workspace is refused.
    pub fn new(args: &LatticeArgs) -> Result<Self, LatticeError> {
        args.check()?;
        let &LatticeArgs { rows_max, max_num_seqs, ref sizes, .. } = args;
        let mut rows: Vec<u32> = natural_sizes(rows_max).collect();
        if let Some(sizes) = sizes {
            rows.retain(|&r| r < max_num_seqs);
            rows.push(max_num_seqs);
            rows.extend(sizes);
            rows.push(rows_max);
        }
        rows.iter_mut().for_each(|rows| *rows = args.rounded(*rows));
        rows.sort_unstable();
        rows.dedup();
        if rows.len() > BUCKETS_MAX {
            return Err(LatticeError::TooMany { count: rows.len() });
        }
        Ok(Self::of_sizes(&rows, max_num_seqs))
    }

    /// The lattice of exactly these sizes, ascending.
    pub(crate) fn of_sizes(sizes: &[u32], max_num_seqs: u32) -> Self {
        let bucket = |(index, &rows): (usize, &u32)| Bucket {
            index: index as u16,
            rows,
            out_rows: rows.min(max_num_seqs),
        };
        Self { buckets: sizes.iter().enumerate().map(bucket).collect(), max_num_seqs }
    }

    /// Reads `ATOM_TOKEN_GRAPH_SIZES`: comma-separated row counts, spaces allowed, empty = none.
    pub fn parse_sizes(text: &str) -> Result<Option<Vec<u32>>, LatticeError> {
        if text.trim().is_empty() {
            return Ok(None);
        }
        let parse = |part: &str| {
            part.trim().parse().map_err(|_| LatticeError::NotANumber { text: part.trim().to_owned() })
        };
        text.split(',').map(parse).collect::<Result<_, _>>().map(Some)
    }

    /// The smallest bucket that holds the group's largest count.
    pub fn holding(&self, rows: GroupRows) -> Bucket {
        let at = self.buckets.partition_point(|b| b.rows < rows.0);
        // GroupRows is capped by the top bucket, so there is one.
        self.buckets[at]
    }

    /// The largest bucket that holds no more than `rows`.
    pub(crate) fn at_most(&self, rows: usize) -> Option<Bucket> {
        let at = self.buckets.partition_point(|b| b.rows() <= rows);
        at.checked_sub(1).map(|at| self.buckets[at])
    }

    /// All buckets, smallest first.
    pub fn buckets(&self) -> &[Bucket] {
        &self.buckets
    }

    /// The largest bucket: it caps a step.
    pub fn top(&self) -> Bucket {
        self.buckets[self.buckets.len() - 1]
    }

    /// `--max-num-seqs`.
    pub fn max_num_seqs(&self) -> u32 {
        self.max_num_seqs
    }
}

impl LatticeArgs {
    fn check(&self) -> Result<(), LatticeError> {
        let &Self { rows_max, max_num_seqs, ref sizes, multiple_of, rows_workspace_max } = self;
        let bounds = [
            ("--max-num-batched-tokens", rows_max),
            ("--max-num-seqs", max_num_seqs),
            ("multiple_of", multiple_of),
        ];
        if let Some((flag, _)) = bounds.into_iter().find(|&(_, bound)| bound == 0) {
            return Err(LatticeError::Zero { flag });
        }
        if rows_max < max_num_seqs {
            return Err(LatticeError::TooNarrow { rows_max, max_num_seqs });
        }
        if let Some(&size) = sizes.iter().flatten().find(|&&s| s == 0 || s > rows_max) {
            return Err(LatticeError::SizeOutOfRange { size, rows_max });
        }
        // No size is above the top, so nothing else needs to be looked at.
        match rows_workspace_max {
            Some(max) if self.rounded(rows_max) > max => Err(LatticeError::Workspace {
                rows: self.rounded(rows_max),
                multiple_of,
                rows_workspace_max: max,
                possible: max / multiple_of * multiple_of,
            }),
            _ => Ok(()),
        }
    }

    fn rounded(&self, rows: u32) -> u32 {
        // Saturates to a multiple: sizes near the end of the range are refused for other reasons.
        rows.div_ceil(self.multiple_of).saturating_mul(self.multiple_of)
    }
}

impl Default for LatticeArgs {
    fn default() -> Self {
        Self { rows_max: 0, max_num_seqs: 0, sizes: None, multiple_of: 1, rows_workspace_max: None }
    }
}

fn lower(possible: u32) -> String {
    if possible == 0 {
        String::new()
    } else {
        format!(
            "lower it to {possible} (--max-num-batched-tokens, and --max-num-seqs where that is more), or "
        )
    }
}

fn natural_sizes(rows_max: u32) -> impl Iterator<Item = u32> {
    let next = |&rows: &u32| {
        let step = match rows {
            0..=1 => 1,
            2..=3 => 2,
            4..=31 => 4,
            32..=255 => 8,
            _ => (1 << rows.ilog2()) / 8,
        };
        rows.checked_add(step)
    };
    std::iter::successors(Some(1), next).take_while(move |&r| r < rows_max).chain([rows_max])
}

#[cfg(test)]
mod tests {
    use super::*;

    fn lattice(rows_max: u32, max_num_seqs: u32, sizes: Option<Vec<u32>>) -> Result<Vec<u32>, LatticeError> {
        let lattice = Lattice::new(&LatticeArgs { rows_max, max_num_seqs, sizes, ..LatticeArgs::default() })?;
        Ok(lattice.buckets().iter().map(|b| b.rows).collect())
    }

    #[test]
    fn small_sizes_are_dense_and_the_top_is_always_there() {
        assert_eq!(lattice(1, 1, None), Ok(vec![1]));
        assert_eq!(lattice(30, 4, None), Ok(vec![1, 2, 4, 8, 12, 16, 20, 24, 28, 30]));
        let wide = lattice(2048, 64, None).unwrap();
        assert_eq!(&wide[wide.len() - 9..], &[1024, 1152, 1280, 1408, 1536, 1664, 1792, 1920, 2048]);
        assert!(lattice(16384, 512, None).unwrap().len() <= BUCKETS_MAX);
    }

    #[test]
    fn sizes_given_by_the_user_replace_the_prefill_part_only() {
        assert_eq!(lattice(512, 8, Some(vec![256, 100])), Ok(vec![1, 2, 4, 8, 100, 256, 512]));
    }

    #[test]
    fn impossible_sizes_are_refused_with_the_numbers() {
        assert_eq!(lattice(8, 16, None), Err(LatticeError::TooNarrow { rows_max: 8, max_num_seqs: 16 }));
        let above = Err(LatticeError::SizeOutOfRange { size: 600, rows_max: 512 });
        assert_eq!(lattice(512, 8, Some(vec![600])), above);
        assert!(matches!(lattice(512, 8, Some((1..200).collect())), Err(LatticeError::TooMany { .. })));
        assert_eq!(lattice(0, 1, None), Err(LatticeError::Zero { flag: "--max-num-batched-tokens" }));
    }

    #[test]
    fn what_does_not_fit_the_workspace_is_refused_with_the_numbers() {
        let args = LatticeArgs { rows_max: 2048, max_num_seqs: 8, multiple_of: 6, ..LatticeArgs::default() };
        let bounded = |max| Lattice::new(&LatticeArgs { rows_workspace_max: Some(max), ..args.clone() });
        assert_eq!(bounded(2052).unwrap().top().rows(), 2052);
        let error = bounded(2051).unwrap_err();
        let (rows, multiple_of, rows_workspace_max) = (2052, 6, 2051);
        assert_eq!(error, LatticeError::Workspace { rows, multiple_of, rows_workspace_max, possible: 2046 });
        for number in ["2052", "2051", "lower it to 2046", "multiples of 6"] {
            assert!(error.to_string().contains(number), "{error}");
        }
        let nothing = bounded(5).unwrap_err().to_string();
        assert!(nothing.contains("workspace for 5") && !nothing.contains("lower"), "{nothing}");
    }

    /// (sglang PR#36262, #33200) Sizes 4, 12, 20 and 28 were not divisible by the attention ranks, which
    /// was found while capturing the 43rd of 50 graphs.
    #[test]
    fn b_04_no_bucket_breaks_a_rule_of_the_mesh() {
        for tp in [1, 2, 3, 4, 6, 8, 16] {
            for tile in [1, 4, 6] {
                for sizes in [None, Some(vec![1, 7, 100, 333, 500])] {
                    let multiple_of = tp * tile;
                    let rows_workspace_max = Some(600);
                    let args = LatticeArgs {
                        rows_max: 500,
                        max_num_seqs: 10,
                        sizes,
                        multiple_of,
                        rows_workspace_max,
                    };
                    let lattice = Lattice::new(&args).unwrap();
                    let rows: Vec<_> = lattice.buckets().iter().map(|b| b.rows).collect();
                    assert!(rows.iter().all(|r| r % multiple_of == 0), "tp {tp}, tile {tile}: {rows:?}");
                    assert!(rows.is_sorted_by(|a, b| a < b), "{rows:?}");
                    assert!((500..=600).contains(&lattice.top().rows), "{rows:?}");
                    let mut out = lattice.buckets().iter();
                    assert!(out.all(|b| b.out_rows == b.rows.min(10)), "{rows:?}");
                }
            }
        }
    }

    /// (vllm PR#46324) Sizes that were no multiple of the rows that a request brings when it verifies drafts
    /// read beyond them. Every number of drafts, every number of rows.
    #[test]
    fn b_57_every_bucket_holds_whole_requests() {
        for drafts in 0..=8 {
            for rows_max in (drafts + 1..600).chain([2048, 4097]) {
                for sizes in [None, Some(vec![rows_max / 2 + 1])] {
                    let multiple_of = drafts + 1;
                    let args = LatticeArgs {
                        rows_max,
                        max_num_seqs: 1,
                        sizes,
                        multiple_of,
                        ..LatticeArgs::default()
                    };
                    let lattice = Lattice::new(&args).unwrap();
                    let mut rows = lattice.buckets().iter().map(|b| b.rows);
                    assert!(rows.all(|rows| rows % multiple_of == 0), "{rows_max} rows, {drafts} drafts");
                    assert!((rows_max..rows_max + multiple_of).contains(&lattice.top().rows));
                }
            }
        }
    }

    #[test]
    fn the_variable_is_parsed_strictly() {
        assert_eq!(Lattice::parse_sizes(" 256, 512 "), Ok(Some(vec![256, 512])));
        assert_eq!(Lattice::parse_sizes("  "), Ok(None));
        let refused = Err(LatticeError::NotANumber { text: "-3".into() });
        assert_eq!(Lattice::parse_sizes("256,-3"), refused);
    }
}
