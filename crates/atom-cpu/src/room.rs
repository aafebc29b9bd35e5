//! The memory that steps work in: buffers and scratch, sized by the largest recording.

use crate::aligned::Aligned;
use crate::choices::Choices;
use crate::quantise::{BLOCK, BlockScale};
use crate::record::Recorded;
use crate::shared::Rows;
use crate::sizes::{Place, RoomBytes};
use atom_ops::{Extent, OpsError, StepInputs, StepShape};
use std::marker::PhantomData;
use std::sync::Mutex;

/// Owns the memory. Recording may enlarge it, replaying never does.
pub(crate) struct Room {
    floats: Aligned,
    /// Buffers of group rows, which have room for the worst routing that there is: the system provides
    /// their pages as rows come.
    group: Aligned,
    codes: Aligned,
    tiles: Aligned,
    scales: Aligned,
    gathered: Aligned,
    /// Scores of a row for each worker.
    scores: Aligned,
    /// See [`Choices`].
    choices: Aligned,
    /// What goes to other lanes, then what comes from them: the worst case, which hardly ever comes.
    exchanged: Aligned,
    workers: usize,
    /// Where the group's real rows lie in a buffer of group rows.
    group_map: Vec<u32>,
    /// Lengths that the members of a collective pass.
    counts: Mutex<Vec<usize>>,
}

/// The room during one step, as all workers see it.
pub(crate) struct View<'a> {
    floats: *mut f32,
    group: *mut f32,
    codes: *mut i8,
    tiles: *mut u8,
    scales: *mut BlockScale,
    gathered: *mut f32,
    scores: *mut f32,
    choices: *mut u32,
    exchanged: *mut f32,
    workers: usize,
    /// See [`Room`].
    pub(crate) group_map: &'a [u32],
    /// See [`Room`].
    pub(crate) counts: &'a Mutex<Vec<usize>>,
    owner: PhantomData<&'a mut Room>,
}

// SAFETY: the pointers are handed out only as `Rows`, whose contract covers the threads.
unsafe impl Sync for View<'_> {}

impl Room {
    /// Room for no recording yet.
    pub(crate) fn new(top: &StepShape, workers: usize) -> Result<Self, OpsError> {
        Ok(Self {
            floats: Aligned::zeroed(0, "buffers")?,
            group: Aligned::untouched(0, "buffers of group rows")?,
            codes: Aligned::zeroed(0, "quantised activations")?,
            tiles: Aligned::zeroed(0, "tiles")?,
            scales: Aligned::zeroed(0, "scales of activations")?,
            gathered: Aligned::zeroed(0, "gathered columns")?,
            scores: Aligned::zeroed(0, "scores of experts")?,
            choices: Aligned::zeroed(0, "choices of experts")?,
            exchanged: Aligned::untouched(0, "exchanged rows")?,
            workers,
            group_map: Vec::with_capacity(top.rows * top.lanes),
            counts: Mutex::new(Vec::new()),
        })
    }

    /// Makes room for a recording.
    pub(crate) fn fit(&mut self, recorded: &Recorded) -> Result<(), OpsError> {
        let bytes = recorded.sizes.bytes(self.workers);
        grow(&mut self.floats, bytes.floats, "buffers")?;
        grow(&mut self.codes, bytes.codes, "quantised activations")?;
        grow(&mut self.tiles, bytes.tiles, "tiles")?;
        grow(&mut self.scales, bytes.scales, "scales of activations")?;
        grow(&mut self.gathered, bytes.gathered, "gathered columns")?;
        grow(&mut self.scores, bytes.scores, "scores of experts")?;
        grow(&mut self.choices, bytes.choices, "choices of experts")?;
        let worst = [
            (&mut self.group, bytes.group_floats, "buffers of group rows"),
            (&mut self.exchanged, bytes.exchanged, "exchanged rows"),
        ];
        for (memory, bytes, what) in worst {
            if bytes > memory.len() {
                *memory = Aligned::untouched(bytes, what)?;
            }
        }
        let counts = self.counts.get_mut().unwrap_or_else(std::sync::PoisonError::into_inner);
        counts.clear();
        // What goes to each, and what comes from each.
        counts.reserve(2 * recorded.sizes.members);
        Ok(())
    }

    /// Bytes that steps work in.
    pub(crate) fn bytes(&self) -> RoomBytes {
        let Self { floats, group, codes, tiles, scales, gathered, scores, choices, exchanged, .. } = self;
        RoomBytes {
            floats: floats.len(),
            group_floats: group.len(),
            codes: codes.len(),
            tiles: tiles.len(),
            scales: scales.len(),
            gathered: gathered.len(),
            scores: scores.len(),
            choices: choices.len(),
            exchanged: exchanged.len(),
        }
    }

    /// Fills every buffer with NaN.
    pub(crate) fn poison(&mut self) {
        let floats =
            [&mut self.floats, &mut self.group, &mut self.gathered, &mut self.scores, &mut self.exchanged];
        for memory in floats {
            // All bits set are a NaN, also in the bytes beyond the last whole float.
            memory.fill(0xff);
        }
    }

    /// Content of a buffer.
    #[cfg(test)]
    pub(crate) fn read(&mut self, place: &Place) -> Vec<f32> {
        let arena = if place.extent == Extent::GroupRows { &mut self.group } else { &mut self.floats };
        let floats: *mut f32 = arena.as_mut_ptr().cast();
        // SAFETY: `fit` made room for the place, and the room is ours alone.
        unsafe { Rows::from_raw(floats.add(place.offset), place.rows, place.width).slice(0..place.rows) }
            .to_vec()
    }

    /// The room for a step of a recording that fits.
    pub(crate) fn view(&mut self, recorded: &Recorded, inputs: &StepInputs<'_>) -> View<'_> {
        self.group_map.clear();
        for (lane, &rows) in inputs.group_rows.iter().enumerate() {
            let first = (lane * recorded.shape.rows) as u32;
            self.group_map.extend(first..first + rows);
        }
        View {
            floats: self.floats.as_mut_ptr().cast(),
            group: self.group.as_mut_ptr().cast(),
            codes: self.codes.as_mut_ptr().cast(),
            tiles: self.tiles.as_mut_ptr(),
            scales: self.scales.as_mut_ptr().cast(),
            gathered: self.gathered.as_mut_ptr().cast(),
            scores: self.scores.as_mut_ptr().cast(),
            choices: self.choices.as_mut_ptr().cast(),
            exchanged: self.exchanged.as_mut_ptr().cast(),
            workers: self.workers,
            group_map: &self.group_map,
            counts: &self.counts,
            owner: PhantomData,
        }
    }
}

impl<'a> View<'a> {
    /// A buffer.
    ///
    /// # Safety
    /// The place is of the recording that the view was made for.
    pub(crate) unsafe fn buffer(&self, place: &Place) -> Rows<'a> {
        // SAFETY: `fit` made room for all of the recording's places, zeroed, and they don't overlap;
        // the memory is reached only through `Rows` for as long as `Room` is borrowed.
        unsafe {
            let arena = if place.extent == Extent::GroupRows { self.group } else { self.floats };
            Rows::from_raw(arena.add(place.offset), place.rows, place.width)
        }
    }

    /// Room for the codes and scales of `rows` rows of `width` codes.
    ///
    /// # Safety
    /// The recording quantises a buffer of at least so many elements.
    pub(crate) unsafe fn codes(&self, rows: usize, width: usize) -> (Rows<'a, i8>, Rows<'a, BlockScale>) {
        // SAFETY: as for `buffer`; zeros are valid for both types.
        unsafe { (Rows::from_raw(self.codes, rows, width), Rows::from_raw(self.scales, rows, width / BLOCK)) }
    }

    /// What a worker multiplies rounded activations in: one row.
    ///
    /// # Safety
    /// The recording is the one that the view was made for.
    pub(crate) unsafe fn tiles(&self, recorded: &Recorded, worker: usize) -> Rows<'a, u8> {
        assert!(worker < self.workers, "worker {worker} of {}", self.workers);
        // SAFETY: as for `buffer`; each worker has its own part.
        unsafe { Rows::from_raw(self.tiles.add(worker * recorded.sizes.tiles), 1, recorded.sizes.tiles) }
    }

    /// Room for the columns of `members` ranks, `stride` floats each.
    ///
    /// # Safety
    /// The recording gathers at least so many.
    pub(crate) unsafe fn gathered(&self, members: usize, stride: usize) -> Rows<'a> {
        // SAFETY: as for `buffer`.
        unsafe { Rows::from_raw(self.gathered, members, stride) }
    }

    /// Scratch of each worker for the scores of a row.
    ///
    /// # Safety
    /// The recording is the one that the view was made for.
    pub(crate) unsafe fn scores(&self, recorded: &Recorded) -> Rows<'a> {
        // SAFETY: as for `buffer`.
        unsafe { Rows::from_raw(self.scores, self.workers, recorded.sizes.scores) }
    }

    /// The lists of choices.
    ///
    /// # Safety
    /// The recording is the one that the view was made for.
    pub(crate) unsafe fn choices(&self, recorded: &Recorded) -> Choices<'a> {
        // SAFETY: as for `buffer`.
        unsafe { Choices::from_raw(self.choices, recorded.sizes.choices, recorded.sizes.held) }
    }

    /// Rows of `width` for other lanes, and from them.
    ///
    /// # Safety
    /// The recording is the one that the view was made for, and exchanges rows of this width.
    pub(crate) unsafe fn exchanged(&self, recorded: &Recorded, width: usize) -> [Rows<'a>; 2] {
        // SAFETY: as for `buffer`.
        unsafe {
            [
                Rows::from_raw(self.exchanged, recorded.sizes.sent / width, width),
                Rows::from_raw(
                    self.exchanged.add(recorded.sizes.sent),
                    recorded.sizes.received / width,
                    width,
                ),
            ]
        }
    }
}

fn grow(memory: &mut Aligned, bytes: usize, what: &str) -> Result<(), OpsError> {
    if bytes > memory.len() {
        *memory = Aligned::zeroed(bytes, what)?;
    }
    Ok(())
}
