//! What a GPU would record and take, without one.
#![allow(clippy::unwrap_used, reason = "in tests, also in their helper functions")]

mod common;

use atom_base::Mesh;
use atom_cpu::{Activations, CpuBackend, CpuOptions, WeightShare};
use atom_cuda::{Element, Place, Properties, Sizer};
use atom_model::{ExchangeChoice, ExpertLayout, Model};
use atom_ops::{KvDType, LoadWeights, Reserve, StepShape};
use common::goldens::{MIXTURES, MODELS};
use common::{Setup, mesh, tiny};
use std::sync::Arc;

fn h200() -> Properties {
    Properties {
        name: "NVIDIA H200".into(),
        capability: (9, 0),
        processors: 132,
        shared_bytes_max: 232_448,
        l2_bytes: 60 << 20,
    }
}

fn load(name: &str, backend: &mut dyn LoadWeights) -> Model {
    let seat = Mesh::SINGLE.seats().next().unwrap();
    Model::load(&tiny(name), (&Mesh::SINGLE, ExpertLayout::default()), &seat, backend, &|_, _| {}).unwrap()
}

#[test]
fn a_gpu_records_the_operators_of_a_cpu() {
    for name in MODELS.iter().chain(MIXTURES) {
        let options = CpuOptions {
            threads: 1,
            isa: None,
            activations: Activations::default(),
            share: Arc::new(WeightShare::new()),
            cores: Vec::new(),
        };
        let cpu = load(name, &mut CpuBackend::new(options).unwrap());
        let gpu = load(name, &mut Sizer::new(Element::BF16, &h200()));
        for (rows, out_rows) in [(1, 1), (16, 16), (300, 16)] {
            let shape = StepShape { rows, out_rows, lanes: 1 };
            assert_eq!(cpu.record(shape).ops(), gpu.record(shape).ops(), "{name}");
        }
    }
}

#[test]
fn a_plan_has_all_weights_once_and_its_numbers_when_it_does_not_fit() {
    for name in MODELS.iter().chain(MIXTURES) {
        let mut sizer = Sizer::new(Element::BF16, &h200());
        let model = load(name, &mut sizer);
        let shape = |rows| StepShape { rows, out_rows: 16.min(rows), lanes: 1 };
        let reserve = Reserve {
            top: shape(300),
            layers: model.config().layers,
            attention: Arc::clone(model.attention()),
            page_size: 64,
            pages: 0,
            pages_per_sequence: 8,
            kv_dtype: KvDType::BF16,
            slots: 17,
            vocab: model.config().vocab_size,
            samples: true,
            poison: false,
        };
        for rows in [1, 8, 64, 300] {
            sizer.add(&model.record(shape(rows)), &reserve).unwrap();
        }
        let sizes = sizer.sizes(&reserve);
        // Two bytes each, four for what stays exact, and the gaps between.
        let parameters = tiny(name).parameters() as usize;
        assert!((2 * parameters..4 * parameters + (1 << 20)).contains(&sizes.weights), "{name}: {sizes:?}");
        let spec = model.attention();
        let position = 2 * model.config().layers * spec.kv_heads * spec.head_dim * 2;
        assert_eq!(sizes.page, 64 * position, "{name}");
        let budget = (sizes.fixed() + 5 * sizes.page) as u64;
        assert_eq!(sizes.pages_within(budget).unwrap(), 5, "{name}");
        let error = sizes.pages_within(1 << 20).unwrap_err().to_string();
        assert!(error.contains("MiB") && error.contains("--gpu-memory-utilization"), "{error}");
    }
}

/// Layouts in which ranks meet: by lane, by group with slices and with whole experts, both exchanges.
fn layouts() -> [(Mesh, ExpertLayout); 4] {
    let spread = |exchange| ExpertLayout { expert_parallel: true, exchange };
    [
        (mesh(2, 1, false), ExpertLayout::default()),
        (mesh(2, 1, true), ExpertLayout::default()),
        (mesh(4, 1, true), spread(ExchangeChoice::Dispatch)),
        (mesh(3, 1, true), spread(ExchangeChoice::Gather)),
    ]
}

#[test]
fn ranks_that_meet_record_the_operators_of_a_cpu_and_plan_alike_windows() {
    for (mesh, experts) in layouts() {
        for name in ["qwen3_moe", "glm4_moe", "minimax_m2"] {
            let setup = Setup { mesh, experts, kv_dtype: KvDType::BF16, ..Setup::default() };
            let (config, checkpoint) = (setup.config(), tiny(name));
            let mut windows = Vec::new();
            for seat in mesh.seats() {
                let cpu = setup.cpu();
                let load = |backend: &mut dyn LoadWeights| {
                    Model::load(&checkpoint, (&mesh, experts), &seat, backend, &|_, _| {}).unwrap()
                };
                let on_cpu = load(&mut *cpu(&seat).unwrap());
                let members = Place::new(&Arc::default(), &mesh, &seat).members();
                let mut sizer = Sizer::new(Element::BF16, &h200()).meeting(members);
                let on_gpu = load(&mut sizer);
                let reserve = config.reserve(&on_gpu, &seat);
                for bucket in config.lattice.buckets() {
                    let recording = config.recording(&on_gpu, &seat, bucket);
                    assert_eq!(config.recording(&on_cpu, &seat, bucket).ops(), recording.ops(), "{name}");
                    assert!(!recording.collectives().is_empty());
                    sizer.add(&recording, &reserve).unwrap();
                }
                let sizes = sizer.sizes(&reserve);
                assert!(
                    sizes.windows > 2 * sizes.sets.iter().sum::<usize>() && sizes.sets != [0, 0],
                    "{sizes:?}"
                );
                windows.push(sizes.sets);
            }
            // Who writes into a window and who has it must agree where a set begins.
            windows.dedup();
            assert_eq!(windows.len(), 1, "{name}, {mesh:?} {experts:?}: {windows:?}");
        }
    }
}

#[test]
fn who_meets_nobody_has_no_window() {
    let setup = Setup { kv_dtype: KvDType::BF16, ..Setup::default() };
    let mut sizer = Sizer::new(Element::BF16, &h200());
    let model = load("qwen3_moe", &mut sizer);
    let (config, seat) = (setup.config(), Mesh::SINGLE.seats().next().unwrap());
    let reserve = config.reserve(&model, &seat);
    for bucket in config.lattice.buckets() {
        sizer.add(&config.recording(&model, &seat, bucket), &reserve).unwrap();
    }
    let sizes = sizer.sizes(&reserve);
    assert_eq!((sizes.windows, sizes.sets), (0, [0, 0]));
}
