module decodeloop

go 1.23

require github.com/yalue/onnxruntime_go v1.27.0
