//! What steps waste, and what they may: padding as it is counted, workspace as it is planned.
#![allow(clippy::unwrap_used, reason = "in tests, also in their helper functions")]

mod common;

use atom_base::SamplingParams;
use atom_cpu::{Activations, CpuBackend, CpuOptions, Sketch, WeightShare};
use atom_group::Policy;
use atom_model::{ExchangeChoice, ExpertLayout, Model};
use atom_ops::{Backend, KvDType, Reserve, StepShape};
use atom_rank::{LaneStats, PaddingShares};
use atom_weights::{Checkpoint, DType};
use common::{Setup, ask, expert_parallel, golden, mesh, request, rest, tiny};
use std::sync::Arc;

/// Prompts that fall between two far sizes, on two lanes of which one has nothing.
fn served(padding_per_mille_max: Option<u32>) -> Vec<LaneStats> {
    let setup = Setup {
        mesh: mesh(2, 1, true),
        experts: expert_parallel(),
        rows_max: 1024,
        max_num_seqs: 8,
        sizes: Some(vec![128]),
        max_model_len: 1100,
        policy: Policy { padding_per_mille_max, ..Policy::default() },
        ..Setup::default()
    };
    let host = setup.start(&tiny("qwen3_moe"));
    for length in [130, 250, 380, 510] {
        let prompt: Vec<u32> = (0..length).map(|i| (length * 7 + i * i) % 500).collect();
        let sampling = SamplingParams::greedy();
        let request =
            atom_engine::Request { lane: Some(atom_base::LaneId(0)), ..request(&prompt, 1, sampling) };
        assert_eq!(ask(&host, request).tokens.len(), 1);
    }
    rest(&host);
    host.stats()
}

#[test]
fn padding_is_counted_step_by_step_and_bounded_by_policy() {
    for (bound, is_bounded) in [(Some(250), true), (None, false)] {
        let stats = served(bound);
        for lane in &stats {
            assert_eq!(lane.padding_shares.count(), lane.replays, "a share for every step");
            assert_eq!(lane.fullest_padding_shares, stats[0].fullest_padding_shares, "the group's, on each");
            let share = lane.padding_rows as f64 / (lane.padding_rows + lane.real_rows) as f64;
            assert!((0.0..=1.0).contains(&share), "{lane:?}");
        }
        // Lane 0 is the fullest in every step; lane 1 has nothing but padding.
        assert_eq!(stats[0].padding_shares, stats[0].fullest_padding_shares);
        assert_eq!(stats[1].padding_shares.above(0.75), stats[1].replays);
        assert!((stats[1].padding_shares.sum - stats[1].replays as f64).abs() < 1e-6);
        let wasteful = stats[0].fullest_padding_shares.above(0.5);
        let PaddingShares { steps, .. } = stats[0].fullest_padding_shares;
        assert_eq!(wasteful == 0, is_bounded, "{bound:?}: {steps:?}");
        assert_eq!(stats[0].edge_cut_rows > 0, is_bounded, "{bound:?}");
    }
}

/// The plan is made from recordings alone, before any weight is read; a rank then works in just as much.
#[test]
fn b_42_a_rank_works_in_what_was_planned_for_it() {
    let dispatch = ExpertLayout { expert_parallel: true, exchange: ExchangeChoice::Dispatch };
    let gather = ExpertLayout { expert_parallel: true, exchange: ExchangeChoice::Gather };
    let layouts = [
        (mesh(1, 1, false), ExpertLayout::default()),
        (mesh(2, 1, false), ExpertLayout::default()),
        (mesh(2, 1, true), ExpertLayout::default()),
        (mesh(4, 1, true), gather),
        (mesh(4, 1, true), dispatch),
        (mesh(8, 1, true), dispatch),
    ];
    let synthetic = tiny("qwen3_moe");
    let quantised = Arc::new(Checkpoint::dummy(golden("qwen3_moe"), DType::Q8_0).unwrap());
    for (checkpoint, activations) in
        [(&synthetic, Activations::Int16), (&quantised, Activations::Int8), (&quantised, Activations::Int16)]
    {
        for (mesh, experts) in layouts {
            let layout = (&mesh, experts);
            for seat in mesh.seats() {
                let mut sketch = Sketch::new(2, activations);
                let planned = Model::load(checkpoint, layout, &seat, &mut sketch, &|_, _| {}).unwrap();
                let options = CpuOptions {
                    threads: 2,
                    isa: None,
                    activations,
                    share: Arc::new(WeightShare::new()),
                    cores: Vec::new(),
                };
                let mut backend = CpuBackend::new(options).unwrap();
                let model = Model::load(checkpoint, layout, &seat, &mut backend, &|_, _| {}).unwrap();
                let top = StepShape { rows: 96, out_rows: 8, lanes: mesh.lanes_per_group() };
                backend.reserve(&reserve(&model, top)).unwrap();
                for rows in [96, 8, 1] {
                    let shape = StepShape { rows, out_rows: rows.min(8), ..top };
                    let (recording, same) = (model.record(shape), planned.record(shape));
                    assert_eq!(recording.signature(), same.signature());
                    assert_eq!(recording.buffers(), same.buffers());
                    let bytes = sketch.step_bytes(&same);
                    backend.record(recording).unwrap();
                    if rows == 96 {
                        assert_eq!(backend.step_bytes(), bytes, "{mesh:?} {experts:?} {activations:?}");
                    } else {
                        assert!(bytes < backend.step_bytes(), "smaller steps work in a part of it");
                    }
                }
            }
        }
    }
}

fn reserve(model: &Model, top: StepShape) -> Reserve {
    Reserve {
        top,
        layers: model.config().layers,
        attention: Arc::clone(model.attention()),
        page_size: 16,
        pages: 16,
        pages_per_sequence: 8,
        kv_dtype: KvDType::F32,
        slots: 9,
        vocab: model.config().vocab_size,
        samples: false,
        poison: false,
    }
}
