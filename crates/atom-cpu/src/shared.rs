//! Buffers that several workers write at once, each its own rows.

use std::marker::PhantomData;
use std::ops::Range;

/// A row-major buffer `[rows, width]` shared by the workers of a pool.
///
/// The contract is the caller's: between two barriers an element is either written by one worker or
/// read by any number of them, never both. [`share`] splits rows so that this holds.
pub(crate) struct Rows<'a, T = f32> {
    ptr: *mut T,
    rows: usize,
    width: usize,
    owner: PhantomData<&'a mut [T]>,
}

// SAFETY: a `Rows` is an exclusive borrow handed out row by row; that no two threads use a row at
// once is the contract of `row_mut` and `row`. Elements may be used by a thread that isn't the owner's.
unsafe impl<T: Send> Send for Rows<'_, T> {}
// SAFETY: as above; several threads may read the same row.
unsafe impl<T: Send + Sync> Sync for Rows<'_, T> {}

impl<T> Clone for Rows<'_, T> {
    fn clone(&self) -> Self {
        *self
    }
}

impl<T> Copy for Rows<'_, T> {}

impl<'a, T> Rows<'a, T> {
    /// Shares `data`, which must be a whole number of rows of `width`.
    pub(crate) fn new(data: &'a mut [T], width: usize) -> Self {
        assert!(width > 0 && data.len().is_multiple_of(width), "{} elements in rows of {width}", data.len());
        Self { ptr: data.as_mut_ptr(), rows: data.len() / width, width, owner: PhantomData }
    }

    /// A part of a larger allocation, for buffers laid out in one arena.
    ///
    /// # Safety
    /// `ptr .. ptr + rows * width` must be valid, initialised elements for `'a` and reached only
    /// through `Rows`, whose contract holds for all of them together.
    pub(crate) unsafe fn from_raw(ptr: *mut T, rows: usize, width: usize) -> Self {
        Self { ptr, rows, width, owner: PhantomData }
    }

    /// Its first element. Whoever uses it keeps the contract by himself.
    pub(crate) fn start(&self) -> *mut T {
        self.ptr
    }

    /// Rows of the buffer.
    pub(crate) fn rows(&self) -> usize {
        self.rows
    }

    /// Elements of a row.
    pub(crate) fn width(&self) -> usize {
        self.width
    }

    /// The same buffer with every row cut into `pieces` rows.
    pub(crate) fn split(&self, pieces: usize) -> Self {
        assert!(self.width.is_multiple_of(pieces), "rows of {} elements in {pieces} pieces", self.width);
        Self { rows: self.rows * pieces, width: self.width / pieces, ..*self }
    }

    /// Row `r` for reading.
    ///
    /// # Safety
    /// No thread writes the row while the slice lives.
    pub(crate) unsafe fn row(&self, r: usize) -> &'a [T] {
        assert!(r < self.rows, "row {r} of {}", self.rows);
        // SAFETY: in bounds by the assert; unaliased by a writer by the caller's promise.
        unsafe { std::slice::from_raw_parts(self.ptr.add(r * self.width), self.width) }
    }

    /// Row `r` for writing.
    ///
    /// # Safety
    /// No other reference to the row, on this or another thread, exists while the slice lives.
    #[allow(clippy::mut_from_ref)]
    pub(crate) unsafe fn row_mut(&self, r: usize) -> &'a mut [T] {
        assert!(r < self.rows, "row {r} of {}", self.rows);
        // SAFETY: in bounds by the assert; unaliased by the caller's promise.
        unsafe { std::slice::from_raw_parts_mut(self.ptr.add(r * self.width), self.width) }
    }

    /// Elements `columns` of row `r` for writing.
    ///
    /// # Safety
    /// No other reference to these elements exists while the slice lives.
    #[allow(clippy::mut_from_ref)]
    pub(crate) unsafe fn part_mut(&self, r: usize, columns: Range<usize>) -> &'a mut [T] {
        assert!(
            r < self.rows && columns.start <= columns.end && columns.end <= self.width,
            "columns {columns:?} of row {r} in [{}, {}]",
            self.rows,
            self.width
        );
        // SAFETY: in bounds by the assert; unaliased by the caller's promise.
        unsafe { std::slice::from_raw_parts_mut(self.ptr.add(r * self.width + columns.start), columns.len()) }
    }

    /// Rows `range` for reading, one behind the other.
    ///
    /// # Safety
    /// No thread writes any of the rows while the slice lives.
    pub(crate) unsafe fn slice(&self, range: Range<usize>) -> &'a [T] {
        assert!(range.start <= range.end && range.end <= self.rows, "rows {range:?} of {}", self.rows);
        // SAFETY: as in `row`.
        unsafe {
            std::slice::from_raw_parts(self.ptr.add(range.start * self.width), range.len() * self.width)
        }
    }

    /// Rows `range` for writing, one behind the other.
    ///
    /// # Safety
    /// No other reference to any of the rows exists while the slice lives.
    #[allow(clippy::mut_from_ref)]
    pub(crate) unsafe fn slice_mut(&self, range: Range<usize>) -> &'a mut [T] {
        assert!(range.start <= range.end && range.end <= self.rows, "rows {range:?} of {}", self.rows);
        // SAFETY: as in `row_mut`.
        unsafe {
            std::slice::from_raw_parts_mut(self.ptr.add(range.start * self.width), range.len() * self.width)
        }
    }
}

/// The part of `0 .. total` that belongs to `worker`: contiguous, sizes differ by at most one, and a
/// function of its arguments only.
pub(crate) fn share(total: usize, worker: usize, workers: usize) -> Range<usize> {
    let (each, extra) = (total / workers, total % workers);
    let start = worker * each + worker.min(extra);
    start..start + each + usize::from(worker < extra)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shares_cover_everything_once_and_evenly() {
        for total in 0..40 {
            for workers in 1..7 {
                let shares: Vec<_> = (0..workers).map(|w| share(total, w, workers)).collect();
                let all: Vec<usize> = shares.iter().cloned().flatten().collect();
                assert_eq!(all, (0..total).collect::<Vec<_>>());
                let sizes = shares.iter().map(Range::len);
                assert!(sizes.clone().max().unwrap() - sizes.min().unwrap() <= 1);
            }
        }
    }

    #[test]
    fn rows_are_where_the_width_puts_them() {
        let mut data: Vec<f32> = (0..12).map(|i| i as f32).collect();
        let rows = Rows::new(&mut data, 3);
        // SAFETY: one thread, and no two slices of a row at once.
        unsafe {
            assert_eq!(rows.row(2), [6.0, 7.0, 8.0]);
            rows.row_mut(3)[0] = -1.0;
            assert_eq!(rows.slice(2..4), [6.0, 7.0, 8.0, -1.0, 10.0, 11.0]);
        }
    }
}
