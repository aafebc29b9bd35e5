//! Who goes to which expert: the choices of a step's rows, listed by expert.
//!
//! Of the choices that a row made only those of experts held here count: at most `n = min(top_k, held)`.
//! The i-th of them has slot `row * n + i`, the row of a buffer that keeps one for each. Its place in the
//! list, by expert and then by row, is where scratch has it: so scratch is touched as far as choices come,
//! and not as far as they might. Expert numbers are f32 in buffers; a number that is no expert's
//! (NO_EXPERT, or a NaN) belongs to nobody.

use crate::matmul::RowMap;
use crate::shared::Rows;
use std::ops::Range;

/// Room for the lists. Worker 0 fills them, all read them after a meeting.
#[derive(Clone, Copy)]
pub(crate) struct Choices<'a> {
    /// Where the list of each expert ends and the next one's begins. `[1, held]`
    ends: Rows<'a, u32>,
    /// Rows of their buffer. `[1, capacity]`
    rows: Rows<'a, u32>,
    /// `[1, capacity]`
    slots: Rows<'a, u32>,
    /// `[1, capacity]`
    weights: Rows<'a>,
}

/// The choices of one expert, by rows in ascending order.
pub(crate) struct Chosen<'a> {
    /// Rows of their buffer.
    pub(crate) rows: &'a [u32],
    /// Rows of buffers that keep a slot for each.
    pub(crate) slots: &'a [u32],
    /// Of the first one, in the list of all.
    pub(crate) first: usize,
    /// Their weights.
    pub(crate) weights: &'a [f32],
}

impl<'a> Choices<'a> {
    /// 4-byte words that the lists take.
    pub(crate) fn words(capacity: usize, held: usize) -> usize {
        3 * capacity + held
    }

    /// Lists of up to `capacity` choices of `held` experts.
    ///
    /// # Safety
    /// As for [`Rows::from_raw`], for [`Self::words`] words; any bits are a `u32` and an `f32`.
    pub(crate) unsafe fn from_raw(words: *mut u32, capacity: usize, held: usize) -> Self {
        // SAFETY: four parts one behind the other.
        unsafe {
            Self {
                rows: Rows::from_raw(words, 1, capacity),
                slots: Rows::from_raw(words.add(capacity), 1, capacity),
                weights: Rows::from_raw(words.add(2 * capacity).cast(), 1, capacity),
                ends: Rows::from_raw(words.add(3 * capacity), 1, held),
            }
        }
    }

    /// Lists the choices of `experts` that the first `rows` rows of `map` made. `routes` is
    /// `[.., 2 * top_k]`. Returns how many there are.
    ///
    /// # Safety
    /// Nobody else uses the lists or writes the routes meanwhile.
    pub(crate) unsafe fn group(
        &self,
        routes: Rows<'_>,
        map: RowMap<'_>,
        rows: usize,
        experts: &Range<usize>,
    ) -> usize {
        let top_k = routes.width() / 2;
        let places = top_k.min(experts.len());
        // SAFETY: the caller's promise.
        let (ends, list, slots, weights) = unsafe {
            (self.ends.row_mut(0), self.rows.row_mut(0), self.slots.row_mut(0), self.weights.row_mut(0))
        };
        let ends = &mut ends[..experts.len()];
        ends.fill(0);
        // SAFETY: the caller's promise.
        let route = |row: usize| unsafe { routes.row(row) };
        let real = (0..rows).map(|row| map.at(row));
        for row in real.clone() {
            for (_, expert) in held(&route(row)[..top_k], experts) {
                ends[expert] += 1;
            }
        }
        let mut total = 0;
        for end in &mut *ends {
            (*end, total) = (total, total + *end);
        }
        // From here on an expert's entry is its next free place, in the end its end.
        for row in real {
            let route = route(row);
            for (nth, (place, expert)) in held(&route[..top_k], experts).enumerate() {
                let at = ends[expert] as usize;
                ends[expert] += 1;
                list[at] = row as u32;
                slots[at] = (row * places + nth) as u32;
                weights[at] = route[top_k + place];
            }
        }
        total as usize
    }

    /// Choices listed for `held` experts.
    ///
    /// # Safety
    /// Nobody writes the lists meanwhile.
    pub(crate) unsafe fn total(&self, held: usize) -> usize {
        // SAFETY: the caller's promise.
        unsafe { self.ends.row(0)[held - 1] as usize }
    }

    /// The choices of the `expert`-th expert held here.
    ///
    /// # Safety
    /// Nobody writes the lists while they are read.
    pub(crate) unsafe fn of(&self, expert: usize) -> Chosen<'a> {
        // SAFETY: the caller's promise.
        unsafe {
            let ends = self.ends.row(0);
            let start = if expert == 0 { 0 } else { ends[expert - 1] as usize };
            let range = start..ends[expert] as usize;
            Chosen {
                rows: &self.rows.row(0)[range.clone()],
                slots: &self.slots.row(0)[range.clone()],
                first: range.start,
                weights: &self.weights.row(0)[range],
            }
        }
    }

    /// The list of slots as plain room.
    ///
    /// # Safety
    /// Nobody else uses the lists meanwhile.
    #[allow(clippy::mut_from_ref)]
    pub(crate) unsafe fn slots_mut(&self) -> &'a mut [u32] {
        // SAFETY: the caller's promise.
        unsafe { self.slots.row_mut(0) }
    }

    /// See [`Self::slots_mut`].
    ///
    /// # Safety
    /// Nobody writes the lists while they are read.
    pub(crate) unsafe fn slots(&self) -> &'a [u32] {
        // SAFETY: the caller's promise.
        unsafe { self.slots.row(0) }
    }
}

/// Places of a row's choices that fall on `experts`, each with the expert counted from the first of them.
pub(crate) fn held<'a>(
    numbers: &'a [f32],
    experts: &Range<usize>,
) -> impl Iterator<Item = (usize, usize)> + use<'a> {
    let experts = experts.clone();
    // Compared as floats: a NaN and NO_EXPERT are within no range.
    let (first, end) = (experts.start as f32, experts.end as f32);
    let places = numbers.iter().enumerate().filter(move |(_, number)| **number >= first && **number < end);
    places.map(move |(place, &number)| (place, number as usize - experts.start))
}

/// True if a row with these choices goes to any of `experts`.
pub(crate) fn chose(numbers: &[f32], experts: &Range<usize>) -> bool {
    held(numbers, experts).next().is_some()
}

#[cfg(test)]
mod tests {
    use super::*;
    use atom_ops::NO_EXPERT;

    #[test]
    fn choices_are_listed_by_expert_and_then_by_row() {
        let mut routes = [
            [1.0, 4.0, 0.1, 0.4],
            [f32::NAN; 4],
            [3.0, 4.0, 0.3, 0.5],
            [NO_EXPERT, NO_EXPERT, 0.0, 0.0],
            [0.0, 3.0, 0.2, 0.6],
        ];
        let routes = Rows::new(routes.as_flattened_mut(), 4);
        let mut words = [0; 64];
        // SAFETY: one thread; the words are the lists' alone.
        unsafe {
            let choices = Choices::from_raw(words.as_mut_ptr(), 12, 3);
            assert_eq!(choices.group(routes, RowMap::Dense, 5, &(2..5)), 4);
            assert_eq!(choices.total(3), 4);
            let lists: Vec<_> = (0..3).map(|e| choices.of(e)).map(|c| (c.rows, c.slots, c.weights)).collect();
            let nobody: (&[u32], &[u32], &[f32]) = (&[], &[], &[]);
            assert_eq!(lists[0], nobody);
            // The first of its row's that is held here, and so on.
            assert_eq!(lists[1], (&[2, 4][..], &[4, 8][..], &[0.3, 0.6][..]));
            assert_eq!(lists[2], (&[0, 2][..], &[0, 5][..], &[0.4, 0.5][..]));
            assert_eq!([0, 1, 2].map(|expert| choices.of(expert).first), [0, 0, 2]);
            // Other rows, other experts, in the same room.
            assert_eq!(choices.group(routes, RowMap::Listed(&[4, 1]), 2, &(0..1)), 1);
            // One expert: one slot a row.
            assert_eq!(choices.of(0).slots, [4]);
            assert_eq!(choices.group(routes, RowMap::Dense, 0, &(0..3)), 0);
        }
    }
}
