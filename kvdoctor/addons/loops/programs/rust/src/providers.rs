//! The execution providers of this build: the features of Cargo.toml decide which there are.

use decode_loop::ort::ep;

type Providers = Vec<ep::ExecutionProviderDispatch>;
type Known = (&'static str, &'static str, fn() -> Providers);

/// What is added to a session for the provider of a name: that of its feature, or that of the runtime.
pub fn find(name: &str) -> crate::Result<Providers> {
    // Without error_on_failure ort goes on with the CPU where the provider does not work.
    let all: &[Known] = &[
        ("cpu", "CPUExecutionProvider", Vec::new),
        #[cfg(feature = "coreml")]
        ("coreml", "CoreMLExecutionProvider", || vec![ep::CoreML::default().build().error_on_failure()]),
        #[cfg(feature = "cuda")]
        ("cuda", "CUDAExecutionProvider", || vec![ep::CUDA::default().build().error_on_failure()]),
        #[cfg(feature = "directml")]
        ("directml", "DmlExecutionProvider", || vec![ep::DirectML::default().build().error_on_failure()]),
        #[cfg(feature = "openvino")]
        ("openvino", "OpenVINOExecutionProvider", || vec![ep::OpenVINO::default().build().error_on_failure()]),
        #[cfg(feature = "tensorrt")]
        ("tensorrt", "TensorrtExecutionProvider", || vec![ep::TensorRT::default().build().error_on_failure()]),
        #[cfg(feature = "xnnpack")]
        ("xnnpack", "XnnpackExecutionProvider", || vec![ep::XNNPACK::default().build().error_on_failure()]),
    ];
    match all.iter().find(|(feature, known_as, _)| name == *feature || name == *known_as) {
        Some((_, _, make)) => Ok(make()),
        None => {
            let names: Vec<&str> = all.iter().map(|(feature, ..)| *feature).collect();
            Err(format!("this build has no execution provider {name}; it has {}", names.join(", ")).into())
        }
    }
}
