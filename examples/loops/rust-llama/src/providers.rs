//! The execution providers of this build: the features of Cargo.toml decide which there are.

#[cfg(not(feature = "ort-rc10"))]
use ort::ep;

/// The providers under the names of the newest release.
#[cfg(feature = "ort-rc10")]
mod ep {
    pub use ort::execution_providers::{
        CUDAExecutionProvider as CUDA, CoreMLExecutionProvider as CoreML,
        DirectMLExecutionProvider as DirectML, ExecutionProviderDispatch,
        OpenVINOExecutionProvider as OpenVINO, TensorRTExecutionProvider as TensorRT,
        XNNPACKExecutionProvider as XNNPACK,
    };
}

/// One execution provider.
pub struct Provider {
    /// The name of its feature.
    pub name: &'static str,
    /// Its name in the runtime.
    known_as: &'static str,
    /// What is added to a session; the CPU is in every session.
    pub add: fn() -> Vec<ep::ExecutionProviderDispatch>,
}

static PROVIDERS: &[Provider] = &[
    Provider { name: "cpu", known_as: "CPUExecutionProvider", add: Vec::new },
    #[cfg(feature = "coreml")]
    Provider {
        name: "coreml",
        known_as: "CoreMLExecutionProvider",
        // Without it, ort goes on with the CPU where the provider does not work.
        add: || vec![ep::CoreML::default().build().error_on_failure()],
    },
    #[cfg(feature = "cuda")]
    Provider {
        name: "cuda",
        known_as: "CUDAExecutionProvider",
        // Without it, ort goes on with the CPU where the provider does not work.
        add: || vec![ep::CUDA::default().build().error_on_failure()],
    },
    #[cfg(feature = "directml")]
    Provider {
        name: "directml",
        known_as: "DmlExecutionProvider",
        // Without it, ort goes on with the CPU where the provider does not work.
        add: || vec![ep::DirectML::default().build().error_on_failure()],
    },
    #[cfg(feature = "openvino")]
    Provider {
        name: "openvino",
        known_as: "OpenVINOExecutionProvider",
        // Without it, ort goes on with the CPU where the provider does not work.
        add: || vec![ep::OpenVINO::default().build().error_on_failure()],
    },
    #[cfg(feature = "tensorrt")]
    Provider {
        name: "tensorrt",
        known_as: "TensorrtExecutionProvider",
        // Without it, ort goes on with the CPU where the provider does not work.
        add: || vec![ep::TensorRT::default().build().error_on_failure()],
    },
    #[cfg(feature = "xnnpack")]
    Provider {
        name: "xnnpack",
        known_as: "XnnpackExecutionProvider",
        // Without it, ort goes on with the CPU where the provider does not work.
        add: || vec![ep::XNNPACK::default().build().error_on_failure()],
    },
];

impl Provider {
    /// The provider of a name.
    pub fn of(name: &str) -> crate::Result<&'static Self> {
        PROVIDERS.iter().find(|one| one.name == name || one.known_as == name).ok_or_else(|| {
            let names: Vec<&str> = PROVIDERS.iter().map(|one| one.name).collect();
            let names = names.join(", ");
            format!("this build has no execution provider {name}; it has {names}").into()
        })
    }
}
