//! Attention, with what stands in front of it.

use super::Scene;
use crate::fuse::FewAttention;
use crate::launch::attend::{self, AttendScratch, AttendStep, TileMaps};
use crate::launch::attend_few::{self, FewMaps};
use crate::launch::rope::{self, HeadNorms, Heads, Places as RowPlaces};
use atom_ops::{AttentionSpec, Buf, OpsError, Weight};

impl Scene<'_> {
    pub(super) fn rotate_and_cache(
        &self,
        qkv: Buf,
        layer: usize,
        qk_norm: Option<(Weight, Weight, f32)>,
        spec: &AttentionSpec,
    ) -> Result<(), OpsError> {
        self.heads(qkv, spec)?;
        let (heads, norms, places) = self.turning(qk_norm, spec)?;
        let cache = self.with.reserved.cache(layer)?;
        let (queue, element, heads) = (&self.with.queue, self.element(qkv), (&heads, norms));
        // SAFETY: see `op`.
        unsafe {
            rope::rotate_and_cache(queue, element, self.at(qkv), cache, heads, places, self.real(qkv))
        }?;
        Ok(())
    }

    /// How heads are normed and turned, and for which rows.
    pub(super) fn turning(
        &self,
        qk_norm: Option<(Weight, Weight, f32)>,
        spec: &AttentionSpec,
    ) -> Result<(Heads, Option<HeadNorms>, RowPlaces), OpsError> {
        let norms = match qk_norm {
            None => None,
            Some((q, k, eps)) => {
                let (q, k) = (self.vector(q, spec.head_dim)?, self.vector(k, spec.head_dim)?);
                Some(HeadNorms { q, k, eps })
            }
        };
        let heads = Heads {
            q: spec.q_heads,
            kv: spec.kv_heads,
            head_dim: spec.head_dim,
            dim: spec.rotary.dim,
            pairs: spec.rotary.pairs,
            magnitude: spec.rotary.magnitude,
            frequencies: self.with.reserved.frequencies.address(),
        };
        let places = RowPlaces {
            positions: self.staged(self.layout.positions),
            cache_rows: self.staged(self.layout.cache_rows),
        };
        Ok((heads, norms, places))
    }

    pub(super) fn attend_step(&self, qkv: Buf, out: Buf) -> AttendStep {
        let reserved = self.with.reserved;
        AttendStep {
            header: self.header(),
            positions: self.staged(self.layout.positions),
            row_slots: self.staged(self.layout.row_slots),
            tables: reserved.tables.address(),
            table_stride: reserved.reserve.pages_per_sequence,
            rows: self.recording.shape().rows,
            qkv: self.at(qkv),
            out: self.at(out),
        }
    }

    /// The whole of a layer's attention in a step of few rows.
    pub(super) fn attend_few(&self, fused: &FewAttention<'_>) -> Result<(), OpsError> {
        let &FewAttention { qkv, layer, qk_norm, spec, out } = fused;
        self.heads(qkv, spec)?;
        self.same_type(qkv, out)?;
        let (queue, reserved) = (&self.with.queue, self.with.reserved);
        let attention = &reserved.attention;
        let few = attention.few.as_ref().expect("steps were fused for it");
        let (heads, norms, places) = self.turning(qk_norm, spec)?;
        let cache = reserved.cache(layer)?;
        let pages = (&cache, reserved.reserve.pages);
        let maps = FewMaps::new(queue.stream.device(), few, &attention.heads, pages)?;
        let (heads, step) = ((&heads, norms, &attention.heads), (&self.attend_step(qkv, out), places));
        // SAFETY: see `op`; a plan's rows of a slot are one span, and pages that others may read are full before.
        unsafe { attend_few::attend_few(queue, few, heads, step, (&cache, &maps), attention.letters()) }?;
        Ok(())
    }

    /// Rows of long spans by tiles and others by pieces, as the step's lists say; an empty list ends at once.
    pub(super) fn attend(
        &self,
        qkv: Buf,
        layer: usize,
        spec: &AttentionSpec,
        out: Buf,
    ) -> Result<(), OpsError> {
        self.heads(qkv, spec)?;
        self.same_type(qkv, out)?;
        let (queue, reserved) = (&self.with.queue, self.with.reserved);
        let (reserve, attention) = (&reserved.reserve, &reserved.attention);
        let (heads, cache) = (&attention.heads, reserved.cache(layer)?);
        let step = self.attend_step(qkv, out);
        let Some(work) = attention.work else {
            // SAFETY: see `op`.
            unsafe { attend::simple(queue, self.element(qkv), heads, &step, &cache) }?;
            return Ok(());
        };
        let scratch = AttendScratch { start: attention.scratch.address(), slots: work.slots };
        if attention.kernels.has_tiles() && work.room(step.rows).tiles > 0 {
            let maps = TileMaps::new(
                queue.stream.device(),
                &attention.kernels,
                heads,
                &step,
                (&cache, reserve.pages),
            )?;
            let (list, maps) = (self.staged(self.layout.tiles), (&cache, &maps));
            // SAFETY: see `op`.
            unsafe { attend::tiles(queue, &attention.kernels, heads, &step, maps, list, scratch) }?;
        }
        if work.room(step.rows).pieces == 0 {
            return Ok(());
        }
        let list = self.staged(self.layout.pieces);
        // SAFETY: see `op`.
        unsafe { attend::split(queue, &attention.kernels, heads, &step, &cache, list, scratch) }?;
        Ok(())
    }
}
