use super::*;
use atom_ops::{AttentionSpec, Comm, Extent, Ops, Rotary, RouteSpec, StepShape};
use std::sync::Arc;

const WEIGHT: Weight = Weight(7);

struct Layers {
    ops: Ops,
    residual: Buf,
    normed: Buf,
    projected: Buf,
    qkv: Buf,
    attended: Buf,
    wide: Buf,
    gated: Buf,
    spec: Arc<AttentionSpec>,
}

impl Layers {
    fn new(rows: usize) -> Self {
        let mut ops = Ops::new(StepShape { rows, out_rows: rows, lanes: 1 });
        let [residual, normed, projected] = [0; 3].map(|_| ops.buffer(Extent::Rows, 64));
        let (qkv, attended) = (ops.buffer(Extent::Rows, 4 * 16), ops.buffer(Extent::Rows, 2 * 16));
        let (wide, gated) = (ops.buffer(Extent::Rows, 256), ops.buffer(Extent::Rows, 128));
        let rotary = Rotary { frequencies: vec![1.0; 8], dim: 16, pairs: false, magnitude: 1.0 };
        let spec = Arc::new(AttentionSpec { q_heads: 2, kv_heads: 1, head_dim: 16, scale: 0.25, rotary });
        let mut layers = Self { ops, residual, normed, projected, qkv, attended, wide, gated, spec };
        layers.ops.embed(WEIGHT, residual);
        layers.ops.norm(residual, WEIGHT, 1e-6, normed);
        layers
    }

    fn attention(&mut self, reduces: bool) {
        self.ops.linear(self.normed, WEIGHT, None, self.qkv);
        self.ops.rotate_and_cache(self.qkv, 0, None, &self.spec);
        self.ops.attend(self.qkv, 0, &self.spec, self.attended);
        self.ops.linear(self.attended, WEIGHT, None, self.projected);
        if reduces {
            self.ops.all_reduce(self.projected, Comm::Lane);
        }
        self.ops.add_norm(self.residual, self.projected, WEIGHT, 1e-6, self.normed);
    }

    fn mlp(&mut self) {
        self.ops.linear(self.normed, WEIGHT, None, self.wide);
        self.ops.gated_silu(self.wide, self.gated);
        self.ops.linear(self.gated, WEIGHT, None, self.projected);
        self.ops.add_norm(self.residual, self.projected, WEIGHT, 1e-6, self.normed);
    }

    fn head(mut self) -> Recording {
        let picked = self.ops.buffer(Extent::OutRows, 64);
        let logits = self.ops.buffer(Extent::OutRows, 300);
        self.ops.pick_rows(self.normed, picked);
        self.ops.linear(picked, WEIGHT, None, logits);
        self.ops.sample(logits);
        self.ops.finish()
    }
}

/// Steps in words: products as what they norm and what they make.
fn words(steps: &[Step<'_>]) -> Vec<String> {
    let word = |step: &Step<'_>| match step {
        Step::Product(fused) => {
            assert_eq!(fused.norm.is_some(), fused.product.norms);
            let norm = if fused.product.norms { "norm, " } else { "" };
            let scale = if fused.scale.is_some() { "scale, " } else { "" };
            let next = if fused.next.is_some() { ", weigh" } else { "" };
            format!("{norm}{scale}{:?}{next}", fused.product.out)
        }
        Step::Fp8(fused) => {
            format!("{}Fp8 {:?}", if fused.norm.is_some() { "norm, " } else { "" }, fused.product.out)
        }
        other => other.name().to_owned(),
    };
    steps.iter().map(word).collect()
}

fn all(recording: &Recording) -> Vec<String> {
    words(&fuse_where(recording, Element::BF16, |_| None, |_| true, None))
}

#[test]
fn a_dense_layer_is_four_products_with_attention_between() {
    let mut layers = Layers::new(4);
    for _ in 0..2 {
        layers.attention(false);
        layers.mlp();
    }
    let recording = layers.head();
    let layer =
        ["norm, Activations", "rotate and cache", "attend", "Residual", "norm, GatedSilu", "Residual"];
    let expected = [&["embed"][..], &layer, &layer, &["norm", "pick rows", "F32", "sample"]].concat();
    assert_eq!(all(&recording), expected);
}

#[test]
fn products_of_fp8_take_in_the_same_if_rows_are_few_and_a_norm_in_any_case() {
    let layer = |rows| {
        let mut layers = Layers::new(rows);
        layers.attention(false);
        layers.mlp();
        let recording = layers.head();
        words(&fuse_where(&recording, Element::BF16, |_| Some(Fp8Form::Channel), |_| false, None))
    };
    let head = ["norm", "pick rows", "Fp8 F32", "sample"];
    let few = [
        &["embed", "norm, Fp8 Activations", "rotate and cache", "attend", "Fp8 Residual"][..],
        &["norm, Fp8 GatedSilu", "Fp8 Residual"],
        &head,
    ];
    // Scales of outputs come in by a kernel behind the product up to 128 rows.
    assert_eq!(layer(16), few.concat());
    assert_eq!(layer(128), few.concat());
    let many = [
        &["embed", "norm, Fp8 Activations", "rotate and cache", "attend", "Fp8 Activations", "add and norm"]
            [..],
        &["Fp8 Activations", "gated SiLU", "Fp8 Activations", "add and norm"],
        &head[1..],
    ];
    assert_eq!(layer(129), many.concat());
}

#[test]
fn products_that_are_not_taken_stay_as_they_were_recorded() {
    let mut layers = Layers::new(4);
    layers.attention(false);
    layers.mlp();
    let recording = layers.head();
    let steps = fuse_where(&recording, Element::BF16, |_| None, |_| false, None);
    assert!(steps.iter().zip(recording.ops()).all(|(step, op)| *step == Step::Op(op)));
    assert_eq!(steps.len(), recording.ops().len());
    // Without norms in front the rest is taken in all the same.
    let steps = fuse_where(&recording, Element::BF16, |_| None, |product| !product.norms, None);
    let expected = [
        "embed",
        "norm",
        "Activations",
        "rotate and cache",
        "attend",
        "Residual",
        "norm",
        "GatedSilu",
        "Residual",
        "norm",
        "pick rows",
        "F32",
        "sample",
    ];
    assert_eq!(words(&steps), expected);
}

fn shared(recording: &Recording, is_rows: impl Fn(&SmallProduct) -> bool) -> Vec<String> {
    let mut steps = fuse_where(recording, Element::BF16, |_| None, |product| !product.norms, None);
    share_norms(&mut steps, is_rows);
    words(&steps)
}

#[test]
fn products_share_the_norm_between_them_if_both_can() {
    let mut layers = Layers::new(4);
    layers.attention(false);
    layers.mlp();
    layers.attention(false);
    let recording = layers.head();
    let expected = [
        "embed",
        "norm",
        "Activations",
        "rotate and cache",
        "attend",
        "Residual, weigh",
        "scale, GatedSilu",
        "Residual, weigh",
        "scale, Activations",
        "rotate and cache",
        "attend",
        // Rows are picked of the last norm.
        "Residual",
        "norm",
        "pick rows",
        "F32",
        "sample",
    ];
    assert_eq!(shared(&recording, |_| true), expected);
    for other in [SmallOut::Residual, SmallOut::GatedSilu] {
        let found = shared(&recording, |product| product.out != other);
        assert_eq!(found[5..8], ["Residual", "norm", "GatedSilu"], "{other:?} by another kernel");
    }
}

#[test]
fn a_norm_that_others_read_as_well_is_not_shared() {
    let mut layers = Layers::new(4);
    layers.attention(false);
    let other = layers.ops.buffer(Extent::Rows, 64);
    layers.ops.linear(layers.normed, WEIGHT, None, other);
    layers.mlp();
    let found = shared(&layers.head(), |_| true);
    assert_eq!(found[5..9], ["Residual", "norm", "Activations", "GatedSilu"]);
}

#[test]
fn a_product_between_two_norms_shares_one_of_them() {
    let mut layers = Layers::new(4);
    layers.attention(false);
    let [middle, normed] = [(); 2].map(|()| layers.ops.buffer(Extent::Rows, 64));
    layers.ops.linear(layers.normed, WEIGHT, None, middle);
    layers.ops.add_norm(layers.residual, middle, WEIGHT, 1e-6, normed);
    layers.normed = normed;
    layers.mlp();
    let found = shared(&layers.head(), |_| true);
    assert_eq!(found[5..9], ["Residual, weigh", "scale, Residual", "norm", "GatedSilu"]);
}

#[test]
fn what_others_read_as_well_is_written() {
    let mut layers = Layers::new(4);
    // Sums over ranks come between the product and the residual.
    layers.attention(true);
    // Two readers of the norm: a router and a shared expert.
    let (logits, routes) = (layers.ops.buffer(Extent::Rows, 8), layers.ops.buffer(Extent::Rows, 4));
    let route = Arc::new(RouteSpec {
        experts: 8,
        top_k: 2,
        is_sigmoid: false,
        groups: 1,
        groups_kept: 1,
        normalise: true,
        scale: 1.0,
    });
    layers.ops.linear(layers.normed, WEIGHT, None, logits);
    layers.ops.route(logits, None, &route, routes);
    layers.mlp();
    let expected = [
        "embed",
        "norm, Activations",
        "rotate and cache",
        "attend",
        "Activations",
        "all-reduce",
        "add and norm",
        "F32",
        "route",
        "GatedSilu",
        "Residual",
        "norm",
        "pick rows",
        "F32",
        "sample",
    ];
    assert_eq!(all(&layers.head()), expected);
}

#[test]
fn a_residual_that_is_read_before_the_sum_keeps_its_own_addition() {
    let mut layers = Layers::new(4);
    layers.ops.linear(layers.normed, WEIGHT, None, layers.projected);
    // Reads the residual between the product and the addition: the product must not have changed it yet.
    let other = layers.ops.buffer(Extent::Rows, 64);
    layers.ops.norm(layers.residual, WEIGHT, 1e-6, other);
    layers.ops.add_norm(layers.residual, layers.projected, WEIGHT, 1e-6, layers.normed);
    layers.ops.add(other, layers.normed);
    let found = all(&layers.head());
    assert_eq!(found[..4], ["embed", "norm, Activations", "norm", "add and norm"]);
}

fn few() -> AttendFew {
    let properties = Properties {
        name: String::new(),
        capability: (9, 0),
        processors: 132,
        shared_bytes_max: 232_448,
        l2_bytes: 0,
    };
    let (sinks, scale) = (crate::memory::Address::NULL, 0.25);
    let heads = crate::launch::attend::AttendHeads { q: 2, kv: 1, head_dim: 16, scale, window: 0, sinks };
    AttendFew::new(&properties, Element::BF16, &heads, 64).expect("an H200 has it")
}

#[test]
fn attention_of_few_rows_takes_in_norms_rope_and_cache() {
    let mut layers = Layers::new(4);
    layers.attention(false);
    layers.mlp();
    let (qkv, attended) = (layers.qkv, layers.attended);
    let recording = layers.head();
    let plain = fuse_where(&recording, Element::BF16, |_| None, |_| true, None);
    let steps = fuse_attention(plain.clone(), &recording, Some(&few()));
    assert_eq!(steps.len(), plain.len() - 1);
    let found: Vec<_> = steps
        .iter()
        .filter_map(|step| match step {
            Step::Attend(few) => Some((few.qkv, few.out, few.layer)),
            _ => None,
        })
        .collect();
    assert_eq!(found, [(qkv, attended, 0)]);
    assert_eq!(fuse_attention(plain.clone(), &recording, None), plain, "no kernel, nothing fused");
}

#[test]
fn attention_of_many_rows_stays_as_it_was() {
    let mut layers = Layers::new(9);
    layers.attention(false);
    let recording = layers.head();
    let plain = fuse_where(&recording, Element::BF16, |_| None, |_| true, None);
    assert_eq!(fuse_attention(plain.clone(), &recording, Some(&few())), plain);
}

#[test]
fn whoever_else_reads_heads_that_were_turned_keeps_them_apart() {
    let mut layers = Layers::new(4);
    layers.attention(false);
    let qkv = layers.qkv;
    layers.ops.add(qkv, qkv);
    let recording = layers.head();
    let plain = fuse_where(&recording, Element::BF16, |_| None, |_| true, None);
    assert_eq!(fuse_attention(plain.clone(), &recording, Some(&few())), plain);
}
